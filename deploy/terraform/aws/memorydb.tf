# MemoryDB: live sessions outlive their server. With TLS, a user with a password, and no other.

locals {
  memorydb_user = "${var.name}-server"
}

data "aws_secretsmanager_secret_version" "memorydb" {
  count     = var.memorydb == null ? 0 : 1
  secret_id = var.memorydb.password_secret_arn
}

# The password is in Terraform's state too: keep that encrypted, and to few.
resource "aws_memorydb_user" "server" {
  count     = var.memorydb == null ? 0 : 1
  user_name = local.memorydb_user
  # Its own keys, and no commands that administer.
  access_string = "on ~asr-serve* &* +@all -@dangerous -@admin +info"

  authentication_mode {
    type      = "password"
    passwords = [data.aws_secretsmanager_secret_version.memorydb[0].secret_string]
  }
  tags = local.tags
}

resource "aws_memorydb_acl" "this" {
  count      = var.memorydb == null ? 0 : 1
  name       = var.name
  user_names = [aws_memorydb_user.server[0].user_name]
  tags       = local.tags
}

resource "aws_memorydb_subnet_group" "this" {
  count      = var.memorydb == null ? 0 : 1
  name       = var.name
  subnet_ids = [for subnet in aws_subnet.private : subnet.id]
  tags       = local.tags
}

# Sessions are never evicted: a full store refuses writes, and the server goes on in its memory.
resource "aws_memorydb_parameter_group" "this" {
  count  = var.memorydb == null ? 0 : 1
  name   = var.name
  family = "memorydb_redis7"

  parameter {
    name  = "maxmemory-policy"
    value = "noeviction"
  }
  tags = local.tags
}

resource "aws_security_group" "memorydb" {
  count       = var.memorydb == null ? 0 : 1
  name_prefix = "${var.name}-memorydb-"
  description = "MemoryDB of ${var.name}: from servers alone"
  vpc_id      = aws_vpc.this.id
  tags        = merge(local.tags, { Name = "${var.name}-memorydb" })

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_memorydb_cluster" "this" {
  count                    = var.memorydb == null ? 0 : 1
  name                     = var.name
  engine_version           = "7.1"
  node_type                = var.memorydb.node_type
  num_shards               = var.memorydb.shards
  num_replicas_per_shard   = var.memorydb.replicas
  acl_name                 = aws_memorydb_acl.this[0].name
  tls_enabled              = true
  kms_key_arn              = aws_kms_key.this.arn
  port                     = 6379
  parameter_group_name     = aws_memorydb_parameter_group.this[0].name
  subnet_group_name        = aws_memorydb_subnet_group.this[0].name
  security_group_ids       = [aws_security_group.memorydb[0].id]
  snapshot_retention_limit = 1
  tags                     = local.tags
}
