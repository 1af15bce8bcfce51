output "address" {
  description = "Where callers go."
  value       = "${var.certificate_arn == null ? "http" : "https"}://${aws_lb.this.dns_name}:${local.listen_port}"
}

output "redis_url" {
  description = "MemoryDB, as `sessions.redis_url` has it; null without one."
  value       = var.memorydb == null ? null : "rediss+cluster://${local.memorydb_user}@${one(aws_memorydb_cluster.this[*].cluster_endpoint[0].address)}:6379"
}

output "host_check" {
  description = "Command that verifies on a host of the edge what this module promises."
  value       = join(" ", concat(["asr-serve doctor --host"], [for name, value in local.host : "--expect ${name}=${value}"]))
}

output "server_settings" {
  description = "The servers' TOML file."
  value       = local.server_settings
}

output "edge_settings" {
  description = "The edge's TOML file."
  value       = local.edge_settings
}

output "log_groups" {
  description = "Log groups of CloudWatch, by what is in them."
  value       = { for name, group in aws_cloudwatch_log_group.this : name => group.name }
}

output "vpc_id" {
  description = "The VPC."
  value       = aws_vpc.this.id
}
