# Values that the module refuses, each by the validation of its own variable: no other one may fail.

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

run "first_validations" {
  command = plan
  variables {
    name                    = "Asr"
    vpc_cidr                = "10.0.0.0/8"
    availability_zones      = ["eu-central-1a"]
    caller_cidrs            = []
    certificate_arn         = "cert"
    rtp_cidrs               = ["0.0.0.0/1", "128.0.0.0/1"]
    ingest                  = { min_size = 3, desired = 2 }
    huge_pages              = 0.5
    nic_queues              = 0
    rx_ring                 = 300
    min_kernel              = "six"
    somaxconn               = 128
    rmem_max                = 212992
    netdev_max_backlog      = 10
    nvme_scheduler          = "cfq"
    cpu_governor            = "powersave"
    transparent_huge_pages  = "yes"
    engine                  = { accelerator = "tpu" }
    package                 = { arm64 = { url = "s3://bucket/asr_serve-0.1.0-py3-none-any.whl", sha256 = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef" } }
    api_keys_secret_arn     = "keys"
    session_keys_secret_arn = "keys"
    memorydb                = { node_type = "cache.r7g.large", password_secret_arn = "arn:aws:secretsmanager:eu-central-1:1:secret:x" }
    log_days                = 42
    alarm_topic_arn         = "me@example.org"
  }
  expect_failures = [var.name, var.vpc_cidr, var.availability_zones, var.certificate_arn, var.rtp_cidrs, var.ingest, var.huge_pages, var.nic_queues, var.rx_ring, var.min_kernel, var.somaxconn, var.rmem_max, var.netdev_max_backlog, var.nvme_scheduler, var.cpu_governor, var.transparent_huge_pages, var.engine, var.package, var.api_keys_secret_arn, var.session_keys_secret_arn, var.memorydb, var.log_days, var.alarm_topic_arn]
}

run "second_validations" {
  command = plan
  variables {
    caller_cidrs    = ["0.0.0.0/0"]
    certificate_arn = null
    engine          = { accelerator = "neuron", ami_id = "ami-0" }
    memorydb        = { replicas = 0, password_secret_arn = "arn:aws:secretsmanager:eu-central-1:1:secret:x" }
  }
  expect_failures = [var.caller_cidrs, var.engine, var.memorydb]
}

run "third_validations" {
  command = plan
  variables {
    caller_cidrs = []
    engine       = { accelerator = "gpu" }
    memorydb     = { password_secret_arn = "hunter2" }
    rtp_cidrs    = ["198.51.100.0/24"]
    sip          = { registrar = "sips:pbx.example.org" }
  }
  expect_failures = [var.caller_cidrs, var.engine, var.memorydb, var.sip]
}

run "fourth_validations" {
  command = plan
  variables {
    caller_cidrs = ["0.0.0.0/1", "128.0.0.0/1"]
    sip          = {}
    package      = { arm64 = { url = "https://example.org/asr_serve-0.1.0-py3-none-any.whl", sha256 = "" } }
    engine       = { ami_id = "ami-0", min_size = 9 }
  }
  expect_failures = [var.caller_cidrs, var.sip, var.package, var.engine]
}
