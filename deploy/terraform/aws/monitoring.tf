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

  # The fullest queue of a server, which the collector writes.
  queue_fill = { namespace = "asr-serve", metric = "asr_serve_ingress_queue_fill_ratio", dimensions = { service = var.name } }

  # `collector`: whether it is made with a collector alone. `scales`: the step of scaling that an alarm takes, in place of
  # telling somebody.
  alarms = {
    "no-server" = {
      description = "No server answers to /ready: callers are refused."
      collector   = false
      source = {
        namespace  = "AWS/NetworkELB"
        metric     = "HealthyHostCount"
        dimensions = { LoadBalancer = aws_lb.this.arn_suffix, TargetGroup = aws_lb_target_group.server["callers"].arn_suffix }
      }
      statistic = "Minimum", comparison = "LessThanThreshold", threshold = 1, minutes = 2, missing = "breaching", scales = null
    }
    "queue-full" = {
      description = "The queue of a server is more than 80 % full: callers are refused soon. Add engines."
      collector   = true
      source      = local.queue_fill
      statistic   = "Maximum", comparison = "GreaterThanThreshold", threshold = 0.8, minutes = 2, missing = "notBreaching", scales = null
    }
    "scale-out" = {
      description = "Adds two hosts of engines."
      collector   = true
      source      = local.queue_fill
      statistic   = "Maximum", comparison = "GreaterThanThreshold", threshold = 0.8, minutes = 1, missing = "notBreaching", scales = "out"
    }
    "scale-in" = {
      description = "Removes one host of engines. Without data nothing is removed: an unknown load is not a low one."
      collector   = true
      source      = local.queue_fill
      statistic   = "Maximum", comparison = "LessThanThreshold", threshold = 0.05, minutes = 5, missing = "notBreaching", scales = "in"
    }
  }

  # Out while the queue fills, in after five minutes in which it stays empty. Never by CPU: docs/scaling.md
  scaling = {
    out = { change = 2, from = 0, to = null, warmup_s = 300 }
    in  = { change = -1, from = null, to = 0, warmup_s = null }
  }
}

resource "aws_cloudwatch_metric_alarm" "this" {
  for_each = { for name, each in local.alarms : name => each if var.collector || !each.collector }

  alarm_name          = "${var.name}-${each.key}"
  alarm_description   = each.value.description
  namespace           = each.value.source.namespace
  metric_name         = each.value.source.metric
  dimensions          = each.value.source.dimensions
  statistic           = each.value.statistic
  comparison_operator = each.value.comparison
  threshold           = each.value.threshold
  period              = 60
  evaluation_periods  = each.value.minutes
  treat_missing_data  = each.value.missing
  alarm_actions       = each.value.scales == null ? local.alarm_actions : [aws_autoscaling_policy.queue[each.value.scales].arn]
  ok_actions          = each.value.scales == null ? local.alarm_actions : []
  tags                = local.tags
}

resource "aws_autoscaling_policy" "queue" {
  for_each = { for name, each in local.scaling : name => each if var.collector }

  name                      = "${var.name}-queue-${each.key}"
  autoscaling_group_name    = aws_autoscaling_group.host["engine"].name
  policy_type               = "StepScaling"
  adjustment_type           = "ChangeInCapacity"
  estimated_instance_warmup = each.value.warmup_s

  step_adjustment {
    metric_interval_lower_bound = each.value.from
    metric_interval_upper_bound = each.value.to
    scaling_adjustment          = each.value.change
  }
}
