# Hosts of the edge and of engines: launch templates and auto-scaling groups.

data "aws_ec2_instance_type" "ingest" {
  instance_type = var.ingest.instance_type
}

data "aws_ec2_instance_type" "engine" {
  instance_type = var.engine.instance_type
}

locals {
  architecture = {
    ingest = data.aws_ec2_instance_type.ingest.supported_architectures[0]
    engine = data.aws_ec2_instance_type.engine.supported_architectures[0]
  }
}

data "aws_ssm_parameter" "image" {
  for_each = local.architecture
  name     = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-${each.value}"
}

# --- what a host may do: read its secrets, write its logs and metrics, and be looked at by Session Manager ---

data "aws_iam_policy_document" "assume" {
  statement {
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

locals {
  secrets = {
    ingest = compact([var.api_keys_secret_arn, try(var.sip.password_secret_arn, null)])
    engine = concat([var.api_keys_secret_arn, var.session_keys_secret_arn], var.memorydb == null ? [] : [var.memorydb.password_secret_arn])
  }
}

data "aws_iam_policy_document" "host" {
  # checkov:skip=CKV_AWS_111:X-Ray has no resources that a policy could name
  # checkov:skip=CKV_AWS_356:as above
  for_each = local.secrets

  statement {
    sid       = "Secrets"
    actions   = ["secretsmanager:GetSecretValue"]
    resources = each.value
  }

  statement {
    sid       = "Logs"
    actions   = ["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"]
    resources = concat(["${aws_cloudwatch_log_group.this[each.key].arn}:*"], each.key == "engine" && var.collector ? ["${aws_cloudwatch_log_group.this["metrics"].arn}:*"] : [])
  }

  statement {
    sid       = "Started"
    actions   = ["autoscaling:CompleteLifecycleAction"]
    resources = ["arn:${data.aws_partition.here.partition}:autoscaling:${data.aws_region.here.name}:${data.aws_caller_identity.here.account_id}:autoScalingGroup:*:autoScalingGroupName/${local.groups[each.key]}"]
  }

  dynamic "statement" {
    for_each = each.key == "engine" && var.collector ? ["Traces"] : []
    content {
      sid       = statement.value
      actions   = ["xray:PutTraceSegments", "xray:PutTelemetryRecords"]
      resources = ["*"]
    }
  }
}

resource "aws_iam_role" "host" {
  for_each           = local.secrets
  name_prefix        = "${var.name}-${each.key}-"
  assume_role_policy = data.aws_iam_policy_document.assume.json
  tags               = local.tags
}

resource "aws_iam_role_policy" "host" {
  for_each = local.secrets
  name     = "asr-serve"
  role     = aws_iam_role.host[each.key].id
  policy   = data.aws_iam_policy_document.host[each.key].json
}

resource "aws_iam_role_policy_attachment" "session_manager" {
  for_each   = local.secrets
  role       = aws_iam_role.host[each.key].name
  policy_arn = "arn:${data.aws_partition.here.partition}:iam::aws:policy/AmazonSSMManagedInstanceCore"
}

resource "aws_iam_instance_profile" "host" {
  for_each    = local.secrets
  name_prefix = "${var.name}-${each.key}-"
  role        = aws_iam_role.host[each.key].name
  tags        = local.tags
}

# --- the edge ---

resource "aws_launch_template" "ingest" {
  name_prefix            = "${var.name}-ingest-"
  image_id               = data.aws_ssm_parameter.image["ingest"].insecure_value
  instance_type          = var.ingest.instance_type
  update_default_version = true
  ebs_optimized          = true
  tags                   = local.tags

  user_data = base64encode(templatefile("${path.module}/templates/host.sh.tftpl", {
    role        = "edge"
    group       = local.groups.ingest
    host        = local.host
    mtu         = local.xdp_mtu
    package     = lookup(var.package, local.architecture.ingest, local.no_package)
    extras      = "edge"
    region      = data.aws_region.here.name
    collector   = null
    health_port = 8004
    secrets     = { for name, arn in { "api-keys" = var.api_keys_secret_arn, "sip-password" = try(var.sip.password_secret_arn, null) } : name => arn if arn != null }
    command     = "edge --config /run/asr-serve/edge.toml --interface $(ip -o -4 route show default | cut -d\" \" -f5 | head -n 1)"
    settings    = local.edge_settings
    log_group   = aws_cloudwatch_log_group.this["ingest"].name
    capability  = "CAP_NET_ADMIN CAP_NET_RAW CAP_BPF CAP_IPC_LOCK"
  }))

  iam_instance_profile {
    arn = aws_iam_instance_profile.host["ingest"].arn
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  monitoring {
    enabled = true
  }

  network_interfaces {
    device_index                = 0
    associate_public_ip_address = false
    security_groups             = [aws_security_group.ingest.id]

    ena_srd_specification {
      ena_srd_enabled = var.enable_mlpf
      ena_srd_udp_specification {
        ena_srd_udp_enabled = var.enable_mlpf
      }
    }
  }

  block_device_mappings {
    device_name = "/dev/xvda"
    ebs {
      volume_type = "gp3"
      volume_size = 40
      encrypted   = true
      kms_key_id  = aws_kms_key.this.arn
    }
  }

  tag_specifications {
    resource_type = "instance"
    tags          = merge(local.tags, { Name = "${var.name}-ingest" })
  }

  lifecycle {
    create_before_destroy = true

    precondition {
      condition     = !var.enable_mlpf || data.aws_ec2_instance_type.ingest.ena_srd_supported
      error_message = "ingest.instance_type is ${var.ingest.instance_type}, which has no ENA Express (enable_mlpf); allowed: types whose ena_srd_supported is true, like c7gn.12xlarge. Choose one, or set enable_mlpf to false."
    }

    precondition {
      condition     = contains(keys(var.package), local.architecture.ingest)
      error_message = "package has wheels for ${join(", ", keys(var.package))}, and ${var.ingest.instance_type} is ${local.architecture.ingest}; allowed: a wheel for each architecture of the hosts. Add package.${local.architecture.ingest}."
    }

    precondition {
      condition     = var.huge_pages * local.huge_page_mib <= data.aws_ec2_instance_type.ingest.memory_size * 0.8
      error_message = "huge_pages is ${var.huge_pages}, which is ${var.huge_pages * local.huge_page_mib} MiB of the ${data.aws_ec2_instance_type.ingest.memory_size} MiB of ${var.ingest.instance_type}; allowed: 80 % of its memory. Choose a larger type, or fewer pages."
    }
  }
}

# --- servers and engines ---

resource "aws_launch_template" "engine" {
  name_prefix            = "${var.name}-engine-"
  image_id               = coalesce(var.engine.ami_id, data.aws_ssm_parameter.image["engine"].insecure_value)
  instance_type          = var.engine.instance_type
  update_default_version = true
  ebs_optimized          = true
  tags                   = local.tags

  user_data = base64encode(templatefile("${path.module}/templates/host.sh.tftpl", {
    role        = "serve"
    group       = local.groups.engine
    host        = merge(local.host, { huge_pages = "0", enable_mlpf = "false" })
    mtu         = null
    package     = lookup(var.package, local.architecture.engine, local.no_package)
    extras      = "redis,encryption,otel"
    region      = data.aws_region.here.name
    collector   = var.collector ? local.collector : null
    health_port = 8000
    secrets = merge(
      { "api-keys" = var.api_keys_secret_arn, "session-keys" = var.session_keys_secret_arn },
      var.memorydb == null ? {} : { "redis-password" = var.memorydb.password_secret_arn }
    )
    command    = "serve --config /etc/asr-serve/asr-serve.toml"
    settings   = local.server_settings
    log_group  = aws_cloudwatch_log_group.this["engine"].name
    capability = ""
  }))

  iam_instance_profile {
    arn = aws_iam_instance_profile.host["engine"].arn
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  monitoring {
    enabled = true
  }

  network_interfaces {
    device_index                = 0
    associate_public_ip_address = false
    security_groups             = [aws_security_group.engine.id]
  }

  block_device_mappings {
    device_name = "/dev/xvda"
    ebs {
      volume_type = "gp3"
      volume_size = 100
      encrypted   = true
      kms_key_id  = aws_kms_key.this.arn
    }
  }

  tag_specifications {
    resource_type = "instance"
    tags          = merge(local.tags, { Name = "${var.name}-engine" })
  }

  lifecycle {
    create_before_destroy = true

    precondition {
      condition     = contains(keys(var.package), local.architecture.engine)
      error_message = "package has wheels for ${join(", ", keys(var.package))}, and ${var.engine.instance_type} is ${local.architecture.engine}; allowed: a wheel for each architecture of the hosts. Add package.${local.architecture.engine}."
    }
  }
}

locals {
  no_package = { url = "https://none", sha256 = "" }

  # The collector's file, for the agent on the host: the name of the host is known there alone.
  collector = replace(replace(replace(replace(file("${path.module}/../../otel/cloudwatch.yaml"),
    "$${env:ASR_SERVE_NAME}", var.name),
    "$${env:ASR_SERVE_KEY_FILE}", "/run/asr-serve/metrics-key"),
    "$${env:AWS_REGION}", data.aws_region.here.name),
  "$${env:HOSTNAME}", "@HOSTNAME@")

  # TOML files of the edge and of the server. A host of the edge adds control_host, its private address, and api_keys.
  edge_settings = join("\n", concat([
    "server = \"http://${aws_lb.inside.dns_name}:8000\"",
    "host = \"0.0.0.0\"",
    "port = 5004",
    "control_port = 8004",
    ], var.sip == null ? [] : [
    "",
    "[sip]",
    "host = \"0.0.0.0\"",
    "user = \"${var.sip.user}\"",
    "allow = ${jsonencode(var.rtp_cidrs)}",
    ], try(["registrar = \"${var.sip.registrar}\""], [])
  ))

  server_settings = join("\n", concat(
    [
      "host = \"0.0.0.0\"",
      "port = 8000",
      "model = \"${var.model}\"",
      "device = \"${var.engine.accelerator == "gpu" ? "cuda" : "cpu"}\"",
      "drain_s = 60",
      "log_format = \"json\"",
      "api_keys_file = \"/run/asr-serve/api-keys\"",
    ],
    var.collector ? ["otel_endpoint = \"http://127.0.0.1:4318\""] : [],
    # Requests of a client come to any host, and hosts are replaced: files and batches would be lost on one of them.
    [
      "",
      "[batch]",
      "enabled = false",
    ],
    var.memorydb == null ? [] : [
      "",
      "[sessions]",
      "redis_url = \"rediss+cluster://${local.memorydb_user}@${one(aws_memorydb_cluster.this[*].cluster_endpoint[0].address)}:6379\"",
      "redis_password_file = \"/run/asr-serve/redis-password\"",
      "key_file = \"/run/asr-serve/session-keys\"",
    ]
  ))
}

# --- groups of both ---

locals {
  scaled = {
    ingest = {
      size     = { min = var.ingest.min_size, max = var.ingest.max_size, desired = var.ingest.desired }
      template = { id = aws_launch_template.ingest.id, version = aws_launch_template.ingest.latest_version }
      # Callers' packets come to the hosts themselves.
      targets = []
      health  = { type = "EC2", grace_s = 300 }
    }
    engine = {
      size     = { min = var.engine.min_size, max = var.engine.max_size, desired = var.engine.desired }
      template = { id = aws_launch_template.engine.id, version = aws_launch_template.engine.latest_version }
      targets  = [for group in aws_lb_target_group.server : group.arn]
      health   = { type = "ELB", grace_s = 900 }
    }
  }
}

resource "aws_autoscaling_group" "host" {
  for_each = local.groups

  name                      = each.value
  min_size                  = local.scaled[each.key].size.min
  max_size                  = local.scaled[each.key].size.max
  desired_capacity          = local.scaled[each.key].size.desired
  vpc_zone_identifier       = [for subnet in aws_subnet.private : subnet.id]
  target_group_arns         = local.scaled[each.key].targets
  health_check_type         = local.scaled[each.key].health.type
  health_check_grace_period = local.scaled[each.key].health.grace_s

  # User data reports CONTINUE once the service answers; a host that does not is replaced.
  initial_lifecycle_hook {
    name                 = "started"
    lifecycle_transition = "autoscaling:EC2_INSTANCE_LAUNCHING"
    default_result       = "ABANDON"
    heartbeat_timeout    = 1800
  }

  launch_template {
    id      = local.scaled[each.key].template.id
    version = local.scaled[each.key].template.version
  }

  instance_refresh {
    strategy = "Rolling"
    preferences {
      min_healthy_percentage = 100
      max_healthy_percentage = 150
    }
  }

  dynamic "tag" {
    for_each = merge(local.tags, { Name = each.value })
    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }

  lifecycle {
    ignore_changes = [desired_capacity]
  }
}
