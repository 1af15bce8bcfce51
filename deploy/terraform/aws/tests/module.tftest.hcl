# What the module plans, with providers that answer without AWS.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  availability_zones      = ["eu-central-1a", "eu-central-1b"]
  caller_cidrs            = ["203.0.113.0/24"]
  certificate_arn         = "arn:aws:acm:eu-central-1:123456789012:certificate/0"
  api_keys_secret_arn     = "arn:aws:secretsmanager:eu-central-1:123456789012:secret:api-keys"
  session_keys_secret_arn = "arn:aws:secretsmanager:eu-central-1:123456789012:secret:session-keys"
  engine                  = { ami_id = "ami-0fedcba9876543210" }
  package                 = { arm64 = { url = "https://example.org/asr_serve-0.1.0-py3-none-any.whl", sha256 = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef" } }
}

run "defaults" {
  assert {
    condition     = one(aws_launch_template.ingest.network_interfaces).ena_srd_specification[0].ena_srd_enabled && one(aws_launch_template.ingest.network_interfaces).ena_srd_specification[0].ena_srd_udp_specification[0].ena_srd_udp_enabled
    error_message = "ENA Express is on for TCP and UDP."
  }
  assert {
    condition     = strcontains(base64decode(aws_launch_template.ingest.user_data), "vm.nr_hugepages = 24576\n") && strcontains(base64decode(aws_launch_template.engine.user_data), "vm.nr_hugepages = 0\n")
    error_message = "Hosts of the edge reserve huge pages, and those of engines do not."
  }
  assert {
    condition = alltrue([for template in [aws_launch_template.ingest, aws_launch_template.engine] :
      template.metadata_options[0].http_tokens == "required" && template.metadata_options[0].http_put_response_hop_limit == 1 &&
      template.block_device_mappings[0].ebs[0].encrypted == "true" && template.block_device_mappings[0].ebs[0].kms_key_id == aws_kms_key.this.arn &&
      template.network_interfaces[0].associate_public_ip_address == "false"
    ])
    error_message = "IMDSv2, encrypted disks, no public addresses."
  }
  assert {
    condition     = aws_lb_listener.this.port == 443 && aws_lb_listener.this.protocol == "TLS"
    error_message = "With a certificate the balancer speaks TLS."
  }
  assert {
    condition     = length(aws_memorydb_cluster.this) == 0 && output.redis_url == null && !strcontains(output.server_settings, "sessions")
    error_message = "Without memorydb there is none, and no setting names it."
  }
  assert {
    condition     = length(aws_subnet.private) == 2 && length(distinct([for each in concat(values(aws_subnet.private), values(aws_subnet.public)) : each.cidr_block])) == 4
    error_message = "Each zone has its own private and public addresses."
  }
  assert {
    condition     = strcontains(output.host_check, "--expect huge_pages=24576") && strcontains(output.host_check, "--expect enable_mlpf=true")
    error_message = "The check asks for what the module promises."
  }
  assert {
    condition     = alltrue([for name, value in local.host : strcontains(base64decode(aws_launch_template.ingest.user_data), " --expect ${name}=${value}")])
    error_message = "The host verifies itself before the edge starts."
  }
  assert {
    condition     = strcontains(base64decode(aws_launch_template.ingest.user_data), "mtu ${local.xdp_mtu} ") && !strcontains(base64decode(aws_launch_template.engine.user_data), " mtu ")
    error_message = "Hosts of the edge have frames that native XDP takes."
  }
  assert {
    condition     = keys(aws_cloudwatch_metric_alarm.this) == ["no-server"] && length(aws_autoscaling_policy.queue) == 0 && !strcontains(base64decode(aws_launch_template.engine.user_data), "metrics-key") && !strcontains(output.server_settings, "otel_endpoint")
    error_message = "Without a collector nothing waits for its metrics."
  }
  assert {
    condition     = keys(aws_vpc_security_group_ingress_rule.outside) == ["callers 203.0.113.0/24", "control ${var.vpc_cidr}"] && !strcontains(output.edge_settings, "sip") && aws_vpc_security_group_ingress_rule.outside["control ${var.vpc_cidr}"].from_port == 8004
    error_message = "The control API is reached from the VPC, and no calls by SIP are taken."
  }
  assert {
    condition     = alltrue([for rule in concat(values(aws_vpc_security_group_egress_rule.outside), values(aws_vpc_security_group_egress_rule.inside)) : rule.ip_protocol == "tcp" && rule.from_port == rule.to_port])
    error_message = "Hosts reach named ports alone."
  }
  assert {
    condition = toset(keys(aws_vpc_security_group_ingress_rule.inside)) == toset(["edge_server", "encode", "server"]) && alltrue([for name, rule in aws_vpc_security_group_ingress_rule.inside :
      rule.security_group_id == aws_vpc_security_group_egress_rule.inside[name].referenced_security_group_id && rule.referenced_security_group_id == aws_vpc_security_group_egress_rule.inside[name].security_group_id && rule.from_port == aws_vpc_security_group_egress_rule.inside[name].from_port
    ])
    error_message = "Who may open a connection is expected where it goes."
  }
  assert {
    condition     = aws_vpc_security_group_ingress_rule.inside["server"].security_group_id == aws_security_group.engine.id && aws_vpc_security_group_ingress_rule.inside["server"].referenced_security_group_id == aws_security_group.balancer.id && aws_vpc_security_group_ingress_rule.inside["server"].from_port == 8000
    error_message = "Servers are reached by the load balancers."
  }
  assert {
    condition = alltrue([for role, group in aws_autoscaling_group.host :
      one(group.initial_lifecycle_hook).default_result == "ABANDON" && group.name == local.groups[role]
    ])
    error_message = "A host that does not report is replaced."
  }
  assert {
    condition     = aws_autoscaling_group.host["engine"].health_check_type == "ELB" && length(aws_autoscaling_group.host["engine"].target_group_arns) > 0 && aws_autoscaling_group.host["ingest"].health_check_type == "EC2" && length(aws_autoscaling_group.host["ingest"].target_group_arns) == 0
    error_message = "Servers are behind the load balancers, and hosts of the edge are not."
  }
  assert {
    condition     = strcontains(base64decode(aws_launch_template.ingest.user_data), "${var.package["arm64"].sha256}  asr_serve-0.1.0-py3-none-any.whl' | sha256sum --check")
    error_message = "The wheel is the one that was named."
  }
}

run "collector" {
  variables {
    collector = true
  }
  assert {
    condition     = aws_cloudwatch_metric_alarm.this["scale-in"].treat_missing_data == "notBreaching"
    error_message = "An unknown load is not a low one."
  }
  assert {
    condition     = alltrue([for way in ["out", "in"] : one(aws_cloudwatch_metric_alarm.this["scale-${way}"].alarm_actions) == aws_autoscaling_policy.queue[way].arn]) && aws_autoscaling_policy.queue["out"].autoscaling_group_name == local.groups.engine
    error_message = "Each alarm of scaling takes its own step."
  }
  assert {
    condition     = strcontains(base64decode(aws_launch_template.engine.user_data), "credentials_file: /run/asr-serve/metrics-key\n") && strcontains(output.server_settings, "otel_endpoint")
    error_message = "The collector scrapes with a key of its own file."
  }
  assert {
    condition     = !strcontains(base64decode(aws_launch_template.engine.user_data), "$${env:") && !strcontains(base64decode(aws_launch_template.ingest.user_data), "metrics-key")
    error_message = "Every variable of the collector's file has its value, and only servers have a collector."
  }
  assert {
    condition     = length(base64decode(aws_launch_template.engine.user_data)) < 16384
    error_message = "EC2 takes 16 KB of user data."
  }
}

run "sip" {
  variables {
    rtp_cidrs = ["198.51.100.0/24"]
    sip       = { registrar = "sip:198.51.100.5", password_secret_arn = "arn:aws:secretsmanager:eu-central-1:123456789012:secret:sip" }
  }
  assert {
    condition     = alltrue([for protocol in ["udp", "tcp"] : alltrue([for rules in [aws_vpc_security_group_ingress_rule.outside, aws_vpc_security_group_egress_rule.outside] : rules["sip-${protocol} 198.51.100.0/24"].from_port == 5060 && rules["sip-${protocol} 198.51.100.0/24"].ip_protocol == protocol])])
    error_message = "Exchanges reach SIP by UDP and TCP."
  }
  assert {
    condition     = strcontains(output.edge_settings, "[sip]\nhost = \"0.0.0.0\"\nuser = \"asr-serve\"\nallow = [\"198.51.100.0/24\"]\nregistrar = \"sip:198.51.100.5\"") && contains(local.secrets.ingest, var.sip.password_secret_arn)
    error_message = "The edge takes calls of the exchanges."
  }
}

run "memorydb" {
  variables {
    memorydb = { password_secret_arn = "arn:aws:secretsmanager:eu-central-1:123456789012:secret:memorydb" }
  }
  assert {
    condition     = aws_memorydb_cluster.this[0].tls_enabled && aws_memorydb_cluster.this[0].acl_name != "open-access" && aws_memorydb_cluster.this[0].kms_key_arn == aws_kms_key.this.arn
    error_message = "MemoryDB has TLS, users and a key."
  }
  assert {
    condition     = output.redis_url == "rediss+cluster://asr-serve-server@clustercfg.asr-serve.memorydb.eu-central-1.amazonaws.com:6379"
    error_message = "Servers reach it by TLS, as a cluster."
  }
  assert {
    condition     = contains(local.secrets.engine, var.memorydb.password_secret_arn) && !contains(local.secrets.ingest, var.memorydb.password_secret_arn)
    error_message = "Only servers may read its password."
  }
  assert {
    condition     = aws_vpc_security_group_ingress_rule.inside["memorydb"].security_group_id == aws_security_group.memorydb[0].id && aws_vpc_security_group_ingress_rule.inside["memorydb"].referenced_security_group_id == aws_security_group.engine.id
    error_message = "Only servers reach MemoryDB."
  }
  assert {
    condition     = !aws_lb_target_group.server["callers"].stickiness[0].enabled
    error_message = "With MemoryDB a client may come back anywhere."
  }
  assert {
    condition     = strcontains(base64decode(aws_launch_template.engine.user_data), "secret:memorydb' --query SecretString --output text > /run/asr-serve/redis-password")
    error_message = "The server's host fetches the password when it starts."
  }
  assert {
    condition     = !strcontains(base64decode(aws_launch_template.engine.user_data), data.aws_secretsmanager_secret_version.memorydb[0].secret_string)
    error_message = "No secret is in user data."
  }
}

run "no_ena_express" {
  variables {
    enable_mlpf = false
    ingest      = { instance_type = "m7g.4xlarge" }
  }
  override_data {
    target = data.aws_ec2_instance_type.ingest
    values = { supported_architectures = ["arm64"], memory_size = 65536, ena_srd_supported = false }
  }
  assert {
    condition     = strcontains(base64decode(aws_launch_template.ingest.user_data), "mtu ${local.xdp_mtu} ")
    error_message = "Native XDP wants short frames with ENA Express and without."
  }
}

run "no_ena_express_but_asked_for" {
  command = plan
  variables {
    ingest = { instance_type = "m7g.4xlarge" }
  }
  override_data {
    target = data.aws_ec2_instance_type.ingest
    values = { supported_architectures = ["arm64"], memory_size = 131072, ena_srd_supported = false }
  }
  expect_failures = [aws_launch_template.ingest]
}

run "the_first_designs_type_has_no_room_for_its_huge_pages" {
  command = plan
  variables {
    ingest = { instance_type = "c8g.4xlarge" }
  }
  override_data {
    target = data.aws_ec2_instance_type.ingest
    values = { supported_architectures = ["arm64"], memory_size = 32768, ena_srd_supported = true }
  }
  expect_failures = [aws_launch_template.ingest]
}

run "no_wheel_for_the_hosts" {
  command = plan
  variables {
    package = { x86_64 = { url = "https://example.org/asr_serve-0.1.0-py3-none-any.whl", sha256 = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef" } }
  }
  expect_failures = [aws_launch_template.ingest, aws_launch_template.engine]
}
