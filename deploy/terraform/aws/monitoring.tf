# CloudWatch: logs of the hosts, metrics that the collector of deploy/otel writes as log events (EMF), flow logs, alarms.

resource "aws_cloudwatch_log_group" "this" {
  for_each          = toset(["ingest", "engine", "metrics", "flow"])
  name              = "/${var.name}/${each.key}"
  retention_in_days = var.log_days
  kms_key_id        = aws_kms_key.this.arn
  tags              = local.tags
}

data "aws_iam_policy_document" "flow_assume" {
  statement {
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["vpc-flow-logs.amazonaws.com"]
    }
    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [data.aws_caller_identity.here.account_id]
    }
  }
}

data "aws_iam_policy_document" "flow" {
  statement {
    actions   = ["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"]
    resources = ["${aws_cloudwatch_log_group.this["flow"].arn}:*"]
  }
}

resource "aws_iam_role" "flow" {
  name_prefix        = "${var.name}-flow-"
  assume_role_policy = data.aws_iam_policy_document.flow_assume.json
  tags               = local.tags
}

resource "aws_iam_role_policy" "flow" {
  name   = "flow-logs"
  role   = aws_iam_role.flow.id
  policy = data.aws_iam_policy_document.flow.json
}

resource "aws_flow_log" "this" {
  vpc_id          = aws_vpc.this.id
  traffic_type    = "ALL"
  log_destination = aws_cloudwatch_log_group.this["flow"].arn
  iam_role_arn    = aws_iam_role.flow.arn
  tags            = local.tags
}

locals {
  alarm_actions = var.alarm_topic_arn == null ? [] : [var.alarm_topic_arn]
}

resource "aws_cloudwatch_metric_alarm" "no_server" {
  alarm_name          = "${var.name}-no-server"
  alarm_description   = "No server answers to /ready: callers are refused."
  namespace           = "AWS/NetworkELB"
  metric_name         = "HealthyHostCount"
  statistic           = "Minimum"
  comparison_operator = "LessThanThreshold"
  threshold           = 1
  period              = 60
  evaluation_periods  = 2
  treat_missing_data  = "breaching"
  alarm_actions       = local.alarm_actions
  ok_actions          = local.alarm_actions
  dimensions = {
    LoadBalancer = aws_lb.this.arn_suffix
    TargetGroup  = aws_lb_target_group.server["callers"].arn_suffix
  }
  tags = local.tags
}

resource "aws_cloudwatch_metric_alarm" "queue" {
  count               = var.collector ? 1 : 0
  alarm_name          = "${var.name}-queue-full"
  alarm_description   = "The queue of a server is more than 80 % full: callers are refused soon. Add engines."
  namespace           = "asr-serve"
  metric_name         = "asr_serve_ingress_queue_fill_ratio"
  statistic           = "Maximum"
  comparison_operator = "GreaterThanThreshold"
  threshold           = 0.8
  period              = 60
  evaluation_periods  = 2
  treat_missing_data  = "notBreaching"
  alarm_actions       = local.alarm_actions
  ok_actions          = local.alarm_actions
  dimensions = {
    service = var.name
  }
  tags = local.tags
}

# Alarms and scaling below look at metrics of the collector, and are made with it alone.
# --- scaling: out while the queue fills, in after five minutes in which it stays empty. Never by CPU: docs/scaling.md ---

resource "aws_autoscaling_policy" "out" {
  count                     = var.collector ? 1 : 0
  name                      = "${var.name}-queue-out"
  autoscaling_group_name    = aws_autoscaling_group.engine.name
  policy_type               = "StepScaling"
  adjustment_type           = "ChangeInCapacity"
  estimated_instance_warmup = 300

  step_adjustment {
    metric_interval_lower_bound = 0
    scaling_adjustment          = 2
  }
}

resource "aws_autoscaling_policy" "in" {
  count                  = var.collector ? 1 : 0
  name                   = "${var.name}-queue-in"
  autoscaling_group_name = aws_autoscaling_group.engine.name
  policy_type            = "StepScaling"
  adjustment_type        = "ChangeInCapacity"

  step_adjustment {
    metric_interval_upper_bound = 0
    scaling_adjustment          = -1
  }
}

resource "aws_cloudwatch_metric_alarm" "scale_out" {
  count               = var.collector ? 1 : 0
  alarm_name          = "${var.name}-scale-out"
  alarm_description   = "Adds two hosts of engines."
  namespace           = "asr-serve"
  metric_name         = "asr_serve_ingress_queue_fill_ratio"
  statistic           = "Maximum"
  comparison_operator = "GreaterThanThreshold"
  threshold           = 0.8
  period              = 60
  evaluation_periods  = 1
  treat_missing_data  = "notBreaching"
  alarm_actions       = [aws_autoscaling_policy.out[0].arn]
  dimensions          = { service = var.name }
  tags                = local.tags
}

resource "aws_cloudwatch_metric_alarm" "scale_in" {
  count               = var.collector ? 1 : 0
  alarm_name          = "${var.name}-scale-in"
  alarm_description   = "Removes one host of engines. Without data nothing is removed: an unknown load is not a low one."
  namespace           = "asr-serve"
  metric_name         = "asr_serve_ingress_queue_fill_ratio"
  statistic           = "Maximum"
  comparison_operator = "LessThanThreshold"
  threshold           = 0.05
  period              = 60
  evaluation_periods  = 5
  treat_missing_data  = "notBreaching"
  alarm_actions       = [aws_autoscaling_policy.in[0].arn]
  dimensions          = { service = var.name }
  tags                = local.tags
}
