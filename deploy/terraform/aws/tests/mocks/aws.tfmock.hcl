# Answers of AWS, as far as the module reads them.

mock_data "aws_iam_policy_document" {
  defaults = { json = "{\"Version\":\"2012-10-17\",\"Statement\":[]}" }
}
mock_data "aws_region" {
  defaults = { name = "eu-central-1" }
}
mock_data "aws_caller_identity" {
  defaults = { account_id = "123456789012" }
}
mock_data "aws_partition" {
  defaults = { partition = "aws" }
}
mock_data "aws_ec2_instance_type" {
  defaults = {
    supported_architectures = ["arm64"]
    memory_size             = 98304
    ena_srd_supported       = true
  }
}
mock_data "aws_ssm_parameter" {
  defaults = { insecure_value = "ami-0123456789abcdef0" }
}
mock_data "aws_secretsmanager_secret_version" {
  defaults = { secret_string = "mocked mocked mocked" }
}
mock_resource "aws_lb" {
  defaults = {
    arn        = "arn:aws:elasticloadbalancing:eu-central-1:123456789012:loadbalancer/net/asr-serve/0123456789abcdef"
    dns_name   = "asr-serve.elb.eu-central-1.amazonaws.com"
    arn_suffix = "net/asr-serve/0123456789abcdef"
  }
}
mock_resource "aws_lb_target_group" {
  defaults = {
    arn        = "arn:aws:elasticloadbalancing:eu-central-1:123456789012:targetgroup/asr-serve/0123456789abcdef"
    arn_suffix = "targetgroup/asr-serve/0123456789abcdef"
  }
}
mock_resource "aws_kms_key" {
  defaults = { arn = "arn:aws:kms:eu-central-1:123456789012:key/00000000-0000-0000-0000-000000000000" }
}
mock_resource "aws_cloudwatch_log_group" {
  defaults = { arn = "arn:aws:logs:eu-central-1:123456789012:log-group:/asr-serve/x" }
}
mock_resource "aws_iam_role" {
  defaults = { arn = "arn:aws:iam::123456789012:role/asr-serve" }
}
mock_resource "aws_iam_instance_profile" {
  defaults = { arn = "arn:aws:iam::123456789012:instance-profile/asr-serve" }
}
mock_resource "aws_launch_template" {
  defaults = { id = "lt-0123456789abcdef0", latest_version = 1 }
}
mock_resource "aws_autoscaling_policy" {
  defaults = { arn = "arn:aws:autoscaling:eu-central-1:123456789012:scalingPolicy:0:autoScalingGroupName/a:policyName/b" }
}
mock_resource "aws_memorydb_cluster" {
  defaults = { cluster_endpoint = [{ address = "clustercfg.asr-serve.memorydb.eu-central-1.amazonaws.com", port = 6379 }] }
}
