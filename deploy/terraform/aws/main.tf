# Hosts of asr-serve on AWS: a VPC, a load balancer, hosts of the edge and of engines, MemoryDB, CloudWatch.

data "aws_region" "here" {}
data "aws_caller_identity" "here" {}
data "aws_partition" "here" {}

locals {
  tags = merge({ "asr-serve" = var.name }, var.tags)

  # What the hosts of the edge have to be, by the names of `asr-serve doctor --host --expect NAME=VALUE`.
  host = {
    huge_pages             = tostring(var.huge_pages)
    enable_mlpf            = tostring(var.enable_mlpf)
    nic_queues             = tostring(var.nic_queues)
    rx_ring                = tostring(var.rx_ring)
    min_kernel             = var.min_kernel
    somaxconn              = tostring(var.somaxconn)
    rmem_max               = tostring(var.rmem_max)
    netdev_max_backlog     = tostring(var.netdev_max_backlog)
    nvme_scheduler         = var.nvme_scheduler
    cpu_governor           = var.cpu_governor
    transparent_huge_pages = var.transparent_huge_pages
  }

  huge_page_mib = 2

  # Longest frame for which drivers allow native XDP, by `asr-serve doctor --edge`. ENA Express would take 8900.
  xdp_mtu = 1500

  # Names that user data is told: a host reports to its group that it has started.
  groups = { ingest = "${var.name}-ingest", engine = "${var.name}-engine" }
}

# --- one key for disks, logs and sessions ---

data "aws_iam_policy_document" "key" {
  # checkov:skip=CKV_AWS_109:a key's own policy names the key as *, and its account administers it
  # checkov:skip=CKV_AWS_111:as above
  # checkov:skip=CKV_AWS_356:as above
  statement {
    sid       = "Account"
    actions   = ["kms:*"]
    resources = ["*"]
    principals {
      type        = "AWS"
      identifiers = ["arn:${data.aws_partition.here.partition}:iam::${data.aws_caller_identity.here.account_id}:root"]
    }
  }

  statement {
    sid       = "Logs"
    actions   = ["kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:DescribeKey"]
    resources = ["*"]
    principals {
      type        = "Service"
      identifiers = ["logs.${data.aws_region.here.name}.amazonaws.com"]
    }
    condition {
      test     = "ArnLike"
      variable = "kms:EncryptionContext:aws:logs:arn"
      values   = ["arn:${data.aws_partition.here.partition}:logs:${data.aws_region.here.name}:${data.aws_caller_identity.here.account_id}:log-group:/${var.name}/*"]
    }
  }

  # Auto Scaling starts hosts whose disks it cannot encrypt otherwise.
  statement {
    sid       = "Disks"
    actions   = ["kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:DescribeKey", "kms:CreateGrant"]
    resources = ["*"]
    principals {
      type        = "AWS"
      identifiers = ["arn:${data.aws_partition.here.partition}:iam::${data.aws_caller_identity.here.account_id}:role/aws-service-role/autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling"]
    }
  }
}

resource "aws_kms_key" "this" {
  description             = "asr-serve ${var.name}: disks, logs, sessions"
  enable_key_rotation     = true
  deletion_window_in_days = 30
  policy                  = data.aws_iam_policy_document.key.json
  tags                    = local.tags
}

resource "aws_kms_alias" "this" {
  name          = "alias/${var.name}"
  target_key_id = aws_kms_key.this.key_id
}
