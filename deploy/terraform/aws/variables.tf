variable "name" {
  description = "Name of this installation, the start of all names."
  type        = string
  default     = "asr-serve"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,19}$", var.name))
    error_message = "name is \"${var.name}\"; allowed: 2 to 20 of a-z, 0-9 and -, a letter first: it is a part of the names of load balancers."
  }
}

variable "tags" {
  description = "Tags of everything that has tags."
  type        = map(string)
  default     = {}
}

# --- network ---

variable "vpc_cidr" {
  description = "Addresses of the VPC."
  type        = string
  default     = "10.40.0.0/16"

  validation {
    condition     = can(cidrhost(var.vpc_cidr, 0)) && can(regex("/(1[6-9]|20)$", var.vpc_cidr))
    error_message = "vpc_cidr is \"${var.vpc_cidr}\"; allowed: an IPv4 range of /16 to /20, like 10.40.0.0/16."
  }
}

variable "availability_zones" {
  description = "Availability zones, each with a public and a private subnet."
  type        = list(string)

  validation {
    condition     = length(var.availability_zones) >= 2 && length(var.availability_zones) <= 4 && length(distinct(var.availability_zones)) == length(var.availability_zones)
    error_message = "availability_zones is [${join(", ", var.availability_zones)}]; allowed: 2 to 4 different ones: MemoryDB has its replica in another one."
  }
}

variable "caller_cidrs" {
  description = "Addresses that may call the load balancer."
  type        = list(string)

  validation {
    condition     = length(var.caller_cidrs) > 0 && alltrue([for each in var.caller_cidrs : each == "0.0.0.0/0" || (can(cidrnetmask(each)) && try(tonumber(split("/", each)[1]), 0) >= 8)])
    error_message = "caller_cidrs is [${join(", ", var.caller_cidrs)}]; allowed: one or more IPv4 ranges of /8 or smaller, like 203.0.113.0/24, or 0.0.0.0/0 with certificate_arn."
  }

  validation {
    condition     = var.certificate_arn != null || !contains(var.caller_cidrs, "0.0.0.0/0")
    error_message = "caller_cidrs holds 0.0.0.0/0 without certificate_arn: the whole internet would send its keys in the clear. Set certificate_arn, or name the callers' addresses."
  }
}

variable "certificate_arn" {
  description = "Certificate in ACM of the load balancer, which then speaks TLS on port 443. Null: plain TCP on port 8000."
  type        = string
  default     = null

  validation {
    condition     = var.certificate_arn == null || can(regex("^arn:aws[a-z-]*:acm:", var.certificate_arn))
    error_message = "certificate_arn is \"${coalesce(var.certificate_arn, "null")}\"; allowed: an ARN of ACM, arn:aws:acm:REGION:ACCOUNT:certificate/ID, or null."
  }
}

variable "rtp_cidrs" {
  description = "Addresses of telephone gateways that may send RTP to the edge. Empty: none."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for each in var.rtp_cidrs : can(cidrnetmask(each)) && try(tonumber(split("/", each)[1]), 0) >= 8])
    error_message = "rtp_cidrs is [${join(", ", var.rtp_cidrs)}]; allowed: IPv4 ranges of gateways, each of /8 or smaller: RTP has no caller's key."
  }
}

variable "sip" {
  description = "Calls by SIP on port 5060 from rtp_cidrs: name of the account, exchange that it registers at, secret with its password. Null: none."
  type = object({
    user                = optional(string, "asr-serve")
    registrar           = optional(string)
    password_secret_arn = optional(string)
  })
  default = null

  validation {
    condition     = var.sip == null ? true : length(var.rtp_cidrs) > 0 && can(regex("^[A-Za-z0-9_.+~-]{1,64}$", var.sip.user)) && (var.sip.registrar == null || can(regex("^sip:[A-Za-z0-9.:;=-]+$", var.sip.registrar))) && (var.sip.password_secret_arn == null || can(regex("^arn:aws[a-z-]*:secretsmanager:", var.sip.password_secret_arn)))
    error_message = "sip is user \"${try(var.sip.user, "")}\", registrar \"${try(coalesce(var.sip.registrar, "null"), "null")}\" with ${length(var.rtp_cidrs)} rtp_cidrs; allowed: a name of a-z, 0-9 and _.+~-, a registrar like sip:pbx.example.org, an ARN of Secrets Manager, and rtp_cidrs that name the exchanges."
  }
}

# --- hosts of the edge: what `asr-serve doctor --host` verifies ---

variable "ingest" {
  description = "Hosts of the edge: type, and least, most and first number."
  type = object({
    instance_type = optional(string, "c7gn.12xlarge")
    min_size      = optional(number, 2)
    max_size      = optional(number, 8)
    desired       = optional(number, 2)
  })
  default = {}

  validation {
    condition     = var.ingest.min_size >= 0 && var.ingest.min_size <= var.ingest.desired && var.ingest.desired <= var.ingest.max_size && var.ingest.max_size <= 100
    error_message = "ingest is min_size ${var.ingest.min_size}, desired ${var.ingest.desired}, max_size ${var.ingest.max_size}; allowed: 0 <= min_size <= desired <= max_size <= 100."
  }
}

variable "enable_mlpf" {
  description = "ENA Express (SRD) for TCP and UDP between the hosts. The instance type has to support it."
  type        = bool
  default     = true
}

variable "huge_pages" {
  description = "vm.nr_hugepages of the hosts of the edge, pages of 2 MiB. 24576, the first design's demand, are 48 GiB: the type needs 64 GiB or more. The driver itself uses 32."
  type        = number
  default     = 24576

  validation {
    condition     = var.huge_pages == floor(var.huge_pages) && var.huge_pages >= 0 && var.huge_pages <= 524288
    error_message = "huge_pages is ${var.huge_pages}; allowed: a whole number of pages of 2 MiB, 0 to 524288."
  }
}

variable "nic_queues" {
  description = "Least receive queues of each network interface; fewer where the host has fewer cores."
  type        = number
  default     = 8

  validation {
    condition     = var.nic_queues == floor(var.nic_queues) && var.nic_queues >= 1 && var.nic_queues <= 128
    error_message = "nic_queues is ${var.nic_queues}; allowed: a whole number, 1 to 128."
  }
}

variable "rx_ring" {
  description = "Descriptors of each receive queue, where the driver allows as many."
  type        = number
  default     = 1024

  validation {
    condition     = contains([256, 512, 1024, 2048, 4096, 8192], var.rx_ring)
    error_message = "rx_ring is ${var.rx_ring}; allowed: 256, 512, 1024, 2048, 4096 or 8192, as the ENA driver has them."
  }
}

variable "min_kernel" {
  description = "Oldest kernel of the hosts."
  type        = string
  default     = "6.1"

  validation {
    condition     = can(regex("^[0-9]+\\.[0-9]+$", var.min_kernel)) && try(tonumber(split(".", var.min_kernel)[0]), 0) >= 5
    error_message = "min_kernel is \"${var.min_kernel}\"; allowed: MAJOR.MINOR, 5.9 or newer: AF_XDP needs it."
  }
}

variable "somaxconn" {
  description = "net.core.somaxconn: connections that wait to be accepted."
  type        = number
  default     = 4096

  validation {
    condition     = var.somaxconn >= 1024 && var.somaxconn <= 65535
    error_message = "somaxconn is ${var.somaxconn}; allowed: 1024, which the server asks for, to 65535."
  }
}

variable "rmem_max" {
  description = "net.core.rmem_max: bytes of packets that wait in one socket."
  type        = number
  default     = 8388608

  validation {
    condition     = var.rmem_max >= 8388608 && var.rmem_max <= 1073741824
    error_message = "rmem_max is ${var.rmem_max}; allowed: 8388608, which the edge asks for, to 1073741824."
  }
}

variable "netdev_max_backlog" {
  description = "net.core.netdev_max_backlog: packets that wait for a core."
  type        = number
  default     = 16384

  validation {
    condition     = var.netdev_max_backlog >= 1000 && var.netdev_max_backlog <= 1000000
    error_message = "netdev_max_backlog is ${var.netdev_max_backlog}; allowed: 1000 to 1000000."
  }
}

variable "nvme_scheduler" {
  description = "Scheduler of NVMe disks."
  type        = string
  default     = "none"

  validation {
    condition     = contains(["none", "mq-deadline", "kyber"], var.nvme_scheduler)
    error_message = "nvme_scheduler is \"${var.nvme_scheduler}\"; allowed: none, mq-deadline, kyber."
  }
}

variable "cpu_governor" {
  description = "Governor of the cores' frequency, where the host lets a guest choose it."
  type        = string
  default     = "performance"

  validation {
    condition     = contains(["performance", "schedutil", "ondemand"], var.cpu_governor)
    error_message = "cpu_governor is \"${var.cpu_governor}\"; allowed: performance, schedutil, ondemand."
  }
}

variable "transparent_huge_pages" {
  description = "Transparent huge pages: always pauses programs to make them."
  type        = string
  default     = "madvise"

  validation {
    condition     = contains(["madvise", "never", "always"], var.transparent_huge_pages)
    error_message = "transparent_huge_pages is \"${var.transparent_huge_pages}\"; allowed: madvise, never, always."
  }
}

# --- hosts of engines ---

variable "engine" {
  description = "Hosts of servers and engines: accelerator (cpu, gpu or neuron), type, and least, most and first number."
  type = object({
    accelerator   = optional(string, "gpu")
    instance_type = optional(string, "g6.2xlarge")
    ami_id        = optional(string)
    min_size      = optional(number, 1)
    max_size      = optional(number, 4)
    desired       = optional(number, 1)
  })
  default = {}

  validation {
    condition     = contains(["cpu", "gpu", "neuron"], var.engine.accelerator)
    error_message = "engine.accelerator is \"${var.engine.accelerator}\"; allowed: cpu, gpu, neuron."
  }

  validation {
    condition     = var.engine.min_size >= 0 && var.engine.min_size <= var.engine.desired && var.engine.desired <= var.engine.max_size && var.engine.max_size <= 100
    error_message = "engine is min_size ${var.engine.min_size}, desired ${var.engine.desired}, max_size ${var.engine.max_size}; allowed: 0 <= min_size <= desired <= max_size <= 100."
  }

  validation {
    condition = {
      cpu    = !can(regex("^(inf|trn|g[0-9]|p[0-9])", var.engine.instance_type))
      gpu    = can(regex("^(g[4-9]|p[3-9])", var.engine.instance_type))
      neuron = can(regex("^(inf2|trn1|trn2)", var.engine.instance_type))
    }[contains(["cpu", "gpu", "neuron"], var.engine.accelerator) ? var.engine.accelerator : "cpu"]
    error_message = "engine.instance_type is \"${var.engine.instance_type}\" with accelerator ${var.engine.accelerator}; allowed: g4 to g9 and p3 to p9 for gpu, inf2, trn1 and trn2 for neuron, others for cpu."
  }

  validation {
    condition     = var.engine.accelerator == "cpu" || var.engine.ami_id != null
    error_message = "engine.ami_id is null with accelerator ${var.engine.accelerator}; allowed: an image with the drivers of the accelerator, such as AWS' Deep Learning AMI. Set engine.ami_id."
  }
}

variable "model" {
  description = "Model of the server."
  type        = string
  default     = "moonshine-tiny-en"
}

variable "package" {
  description = "Wheel of asr-serve by architecture (arm64, x86_64): its https address and its SHA-256, as SHA256SUMS of the release has it."
  type = map(object({
    url    = string
    sha256 = string
  }))

  validation {
    condition     = length(var.package) > 0 && alltrue([for name, each in var.package : contains(["arm64", "x86_64"], name) && can(regex("^https://[A-Za-z0-9._~/%+:-]+\\.whl$", each.url)) && can(regex("^[0-9a-f]{64}$", each.sha256))])
    error_message = "package is ${jsonencode(var.package)}; allowed: arm64 and x86_64, each with url, the https:// address of a wheel (.whl), and sha256, 64 digits of 0-9 and a-f."
  }
}

# --- secrets, by reference ---

variable "api_keys_secret_arn" {
  description = "Secret in Secrets Manager with the API keys, one per line."
  type        = string

  validation {
    condition     = can(regex("^arn:aws[a-z-]*:secretsmanager:", var.api_keys_secret_arn))
    error_message = "api_keys_secret_arn is \"${var.api_keys_secret_arn}\"; allowed: an ARN of Secrets Manager, arn:aws:secretsmanager:REGION:ACCOUNT:secret:NAME."
  }
}

variable "session_keys_secret_arn" {
  description = "Secret in Secrets Manager with the keys of stored sessions: 32 bytes in hexadecimal, one per line."
  type        = string

  validation {
    condition     = can(regex("^arn:aws[a-z-]*:secretsmanager:", var.session_keys_secret_arn))
    error_message = "session_keys_secret_arn is \"${var.session_keys_secret_arn}\"; allowed: an ARN of Secrets Manager, arn:aws:secretsmanager:REGION:ACCOUNT:secret:NAME."
  }
}

variable "memorydb" {
  description = "MemoryDB for live sessions: type of its nodes, replicas of each shard, and the secret with the password of its user. Null: sessions are in the memory of their server."
  type = object({
    node_type           = optional(string, "db.r7g.large")
    shards              = optional(number, 1)
    replicas            = optional(number, 1)
    password_secret_arn = string
  })
  default = null

  validation {
    condition     = var.memorydb == null ? true : can(regex("^db\\.(r|t)[0-9]", var.memorydb.node_type))
    error_message = "memorydb.node_type is \"${try(var.memorydb.node_type, "")}\"; allowed: types of MemoryDB, like db.r7g.large or db.t4g.small."
  }

  validation {
    condition     = var.memorydb == null ? true : var.memorydb.replicas >= 1 && var.memorydb.replicas <= 5 && var.memorydb.shards >= 1 && var.memorydb.shards <= 50
    error_message = "memorydb is ${try(var.memorydb.shards, 0)} shards with ${try(var.memorydb.replicas, 0)} replicas; allowed: 1 to 50 shards, each with 1 to 5 replicas: without one, sessions wait for a new node."
  }

  validation {
    condition     = var.memorydb == null ? true : can(regex("^arn:aws[a-z-]*:secretsmanager:", var.memorydb.password_secret_arn))
    error_message = "memorydb.password_secret_arn is \"${try(var.memorydb.password_secret_arn, "")}\"; allowed: an ARN of Secrets Manager, arn:aws:secretsmanager:REGION:ACCOUNT:secret:NAME."
  }
}

# --- CloudWatch ---

variable "collector" {
  description = "Whether hosts of engines send metrics and traces to CloudWatch and X-Ray. Without it, engines are not scaled, and no alarm looks at their queues."
  type        = bool
  default     = false
}

variable "log_days" {
  description = "Days that logs are kept."
  type        = number
  default     = 365

  validation {
    condition     = contains([1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3288, 3653], var.log_days)
    error_message = "log_days is ${var.log_days}; allowed: what CloudWatch has: 1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827 and more years."
  }
}

variable "alarm_topic_arn" {
  description = "Topic of SNS that alarms go to. Null: they change their state, and tell nobody."
  type        = string
  default     = null

  validation {
    condition     = var.alarm_topic_arn == null || can(regex("^arn:aws[a-z-]*:sns:", var.alarm_topic_arn))
    error_message = "alarm_topic_arn is \"${coalesce(var.alarm_topic_arn, "null")}\"; allowed: an ARN of SNS, arn:aws:sns:REGION:ACCOUNT:TOPIC, or null."
  }
}
