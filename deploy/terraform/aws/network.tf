resource "aws_vpc" "this" {
  cidr_block           = var.vpc_cidr
  enable_dns_hostnames = true
  enable_dns_support   = true
  tags                 = merge(local.tags, { Name = var.name })
}

# Nobody uses it, and it allows nothing.
resource "aws_default_security_group" "this" {
  vpc_id = aws_vpc.this.id
  tags   = local.tags
}

resource "aws_internet_gateway" "this" {
  vpc_id = aws_vpc.this.id
  tags   = merge(local.tags, { Name = var.name })
}

resource "aws_subnet" "public" {
  for_each = { for index, zone in var.availability_zones : zone => index }

  vpc_id                  = aws_vpc.this.id
  availability_zone       = each.key
  cidr_block              = cidrsubnet(var.vpc_cidr, 4, each.value)
  map_public_ip_on_launch = false
  tags                    = merge(local.tags, { Name = "${var.name}-public-${each.key}" })
}

resource "aws_subnet" "private" {
  for_each = { for index, zone in var.availability_zones : zone => index }

  vpc_id            = aws_vpc.this.id
  availability_zone = each.key
  cidr_block        = cidrsubnet(var.vpc_cidr, 4, each.value + 8)
  tags              = merge(local.tags, { Name = "${var.name}-private-${each.key}" })
}

resource "aws_eip" "nat" {
  # checkov:skip=CKV2_AWS_19:it is the NAT gateway's
  for_each = aws_subnet.public
  domain   = "vpc"
  tags     = merge(local.tags, { Name = "${var.name}-nat-${each.key}" })
}

resource "aws_nat_gateway" "this" {
  for_each      = aws_subnet.public
  allocation_id = aws_eip.nat[each.key].id
  subnet_id     = each.value.id
  tags          = merge(local.tags, { Name = "${var.name}-${each.key}" })
  depends_on    = [aws_internet_gateway.this]
}

resource "aws_route_table" "public" {
  vpc_id = aws_vpc.this.id
  tags   = merge(local.tags, { Name = "${var.name}-public" })
}

resource "aws_route" "public" {
  route_table_id         = aws_route_table.public.id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this.id
}

resource "aws_route_table_association" "public" {
  for_each       = aws_subnet.public
  subnet_id      = each.value.id
  route_table_id = aws_route_table.public.id
}

resource "aws_route_table" "private" {
  for_each = aws_subnet.private
  vpc_id   = aws_vpc.this.id
  tags     = merge(local.tags, { Name = "${var.name}-private-${each.key}" })
}

resource "aws_route" "private" {
  for_each               = aws_route_table.private
  route_table_id         = each.value.id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this[each.key].id
}

resource "aws_route_table_association" "private" {
  for_each       = aws_subnet.private
  subnet_id      = each.value.id
  route_table_id = aws_route_table.private[each.key].id
}

# Weights in S3 do not pass the NAT gateways.
resource "aws_vpc_endpoint" "s3" {
  vpc_id            = aws_vpc.this.id
  service_name      = "com.amazonaws.${data.aws_region.here.name}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [for table in aws_route_table.private : table.id]
  tags              = merge(local.tags, { Name = "${var.name}-s3" })
}

# --- who may talk with whom ---

resource "aws_security_group" "balancer" {
  name_prefix = "${var.name}-balancer-"
  description = "Load balancer of ${var.name}: callers"
  vpc_id      = aws_vpc.this.id
  tags        = merge(local.tags, { Name = "${var.name}-balancer" })

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_security_group" "ingest" {
  name_prefix = "${var.name}-ingest-"
  description = "Hosts of the edge of ${var.name}"
  vpc_id      = aws_vpc.this.id
  tags        = merge(local.tags, { Name = "${var.name}-ingest" })

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_security_group" "engine" {
  name_prefix = "${var.name}-engine-"
  description = "Servers and engines of ${var.name}"
  vpc_id      = aws_vpc.this.id
  tags        = merge(local.tags, { Name = "${var.name}-engine" })

  lifecycle {
    create_before_destroy = true
  }
}

locals {
  # Who opens a connection to whom inside: a rule of each of the two groups.
  connections = {
    edge_server = { from = "ingest", to = "balancer", port = 8000, description = "Hosts of the edge to servers, by the load balancer inside" }
    server      = { from = "balancer", to = "engine", port = 8000, description = "Load balancers to servers" }
    encode      = { from = "engine", to = "engine", port = 8100, description = "Engines to those that encode for them" }
    memorydb    = { from = "engine", to = "memorydb", port = 6379, description = "Servers to MemoryDB" }
  }

  security_groups = merge(
    {
      balancer = aws_security_group.balancer.id
      ingest   = aws_security_group.ingest.id
      engine   = aws_security_group.engine.id
    },
    var.memorydb == null ? {} : { memorydb = one(aws_security_group.memorydb[*].id) }
  )

  # Who comes from outside, and where hosts go: a rule for each range of addresses.
  sip_protocols = var.sip == null ? [] : ["udp", "tcp"]
  incoming = concat(
    [{ name = "callers", group = "balancer", cidrs = var.caller_cidrs, protocol = "tcp", port = local.listen_port, description = "Callers" }],
    [{ name = "rtp", group = "ingest", cidrs = var.rtp_cidrs, protocol = "udp", port = 5004, description = "RTP of telephone gateways" }],
    [{ name = "control", group = "ingest", cidrs = [var.vpc_cidr], protocol = "tcp", port = 8004, description = "Control API of the edge, with an API key" }],
    [for protocol in local.sip_protocols : { name = "sip-${protocol}", group = "ingest", cidrs = var.rtp_cidrs, protocol = protocol, port = 5060, description = "SIP of telephone gateways" }]
  )
  # The resolver, the clock and instance metadata need no rule: security groups do not filter them.
  outgoing = concat(
    [for group in ["ingest", "engine"] : { name = "https-${group}", group = group, cidrs = ["0.0.0.0/0"], protocol = "tcp", ports = [443, 443], description = "Packages, secrets, CloudWatch: by HTTPS" }],
    [{ name = "rtp", group = "ingest", cidrs = var.rtp_cidrs, protocol = "udp", ports = [1024, 65535], description = "RTP to telephone gateways, which choose their ports" }],
    [for protocol in local.sip_protocols : { name = "sip-${protocol}", group = "ingest", cidrs = var.rtp_cidrs, protocol = protocol, ports = [5060, 5060], description = "SIP to telephone gateways" }]
  )
}

resource "aws_vpc_security_group_ingress_rule" "inside" {
  for_each                     = { for name, each in local.connections : name => each if contains(keys(local.security_groups), each.to) }
  security_group_id            = local.security_groups[each.value.to]
  referenced_security_group_id = local.security_groups[each.value.from]
  description                  = each.value.description
  from_port                    = each.value.port
  to_port                      = each.value.port
  ip_protocol                  = "tcp"
  tags                         = local.tags
}

resource "aws_vpc_security_group_egress_rule" "inside" {
  for_each                     = { for name, each in local.connections : name => each if contains(keys(local.security_groups), each.to) }
  security_group_id            = local.security_groups[each.value.from]
  referenced_security_group_id = local.security_groups[each.value.to]
  description                  = each.value.description
  from_port                    = each.value.port
  to_port                      = each.value.port
  ip_protocol                  = "tcp"
  tags                         = local.tags
}

resource "aws_vpc_security_group_ingress_rule" "outside" {
  for_each          = merge([for rule in local.incoming : { for cidr in toset(rule.cidrs) : "${rule.name} ${cidr}" => merge(rule, { cidr = cidr }) }]...)
  security_group_id = local.security_groups[each.value.group]
  description       = each.value.description
  cidr_ipv4         = each.value.cidr
  from_port         = each.value.port
  to_port           = each.value.port
  ip_protocol       = each.value.protocol
  tags              = local.tags
}

resource "aws_vpc_security_group_egress_rule" "outside" {
  for_each          = merge([for rule in local.outgoing : { for cidr in toset(rule.cidrs) : "${rule.name} ${cidr}" => merge(rule, { cidr = cidr }) }]...)
  security_group_id = local.security_groups[each.value.group]
  description       = each.value.description
  cidr_ipv4         = each.value.cidr
  from_port         = each.value.ports[0]
  to_port           = each.value.ports[1]
  ip_protocol       = each.value.protocol
  tags              = local.tags
}

# --- load balancers: live callers hold connections for hours, and TCP passes through as it is ---

locals {
  listen_port = var.certificate_arn == null ? 8000 : 443
}

resource "aws_lb" "this" {
  # checkov:skip=CKV_AWS_91:a network load balancer logs TLS connections alone; flow logs of the VPC have all of them
  # checkov:skip=CKV_AWS_150:terraform destroy would need two runs; the balancer has no state
  name                             = var.name
  load_balancer_type               = "network"
  internal                         = false
  subnets                          = [for subnet in aws_subnet.public : subnet.id]
  security_groups                  = [aws_security_group.balancer.id]
  enable_cross_zone_load_balancing = true
  tags                             = local.tags
}

# The edge's way to the servers does not leave the VPC.
resource "aws_lb" "inside" {
  # checkov:skip=CKV_AWS_91:as above
  # checkov:skip=CKV_AWS_150:as above
  name                             = "${var.name}-inside"
  load_balancer_type               = "network"
  internal                         = true
  subnets                          = [for subnet in aws_subnet.private : subnet.id]
  security_groups                  = [aws_security_group.balancer.id]
  enable_cross_zone_load_balancing = true
  tags                             = local.tags
}

resource "aws_lb_target_group" "server" {
  for_each = toset(["callers", "inside"])

  name                 = "${var.name}-${each.key}"
  port                 = 8000
  protocol             = "TCP"
  vpc_id               = aws_vpc.this.id
  deregistration_delay = 60
  # Without Redis, a session is in the memory of one server: its client comes back there.
  stickiness {
    type    = "source_ip"
    enabled = var.memorydb == null
  }
  # checkov:skip=CKV_AWS_378:TLS ends at the balancer, and the way to the hosts is inside the VPC
  health_check {
    protocol            = "HTTP"
    path                = "/ready"
    port                = "8000"
    interval            = 10
    healthy_threshold   = 2
    unhealthy_threshold = 2
  }
  tags = local.tags
}

resource "aws_lb_listener" "this" {
  # checkov:skip=CKV2_AWS_74:the policy of TLS 1.3 and 1.2 is set where there is a certificate
  # checkov:skip=CKV_AWS_2:without certificate_arn callers are named one by one (caller_cidrs)
  # checkov:skip=CKV_AWS_103:as above
  load_balancer_arn = aws_lb.this.arn
  port              = local.listen_port
  protocol          = var.certificate_arn == null ? "TCP" : "TLS"
  certificate_arn   = var.certificate_arn
  ssl_policy        = var.certificate_arn == null ? null : "ELBSecurityPolicy-TLS13-1-2-2021-06"
  tags              = local.tags

  default_action {
    type             = "forward"
    target_group_arn = aws_lb_target_group.server["callers"].arn
  }
}

resource "aws_lb_listener" "inside" {
  # checkov:skip=CKV_AWS_2:from the edge's hosts to the servers', inside the VPC
  # checkov:skip=CKV_AWS_103:as above
  load_balancer_arn = aws_lb.inside.arn
  port              = 8000
  protocol          = "TCP"
  tags              = local.tags

  default_action {
    type             = "forward"
    target_group_arn = aws_lb_target_group.server["inside"].arn
  }
}
