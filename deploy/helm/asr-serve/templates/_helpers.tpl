{{- define "asr-serve.name" -}}
{{- if contains "asr-serve" .Release.Name -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-asr-serve" .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "asr-serve.selector" -}}
app.kubernetes.io/name: asr-serve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "asr-serve.labels" -}}
{{ include "asr-serve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "asr-serve.image" -}}
{{- $repository := .Values.image.repository | default (ternary "asr-serve-ray" "asr-serve" (eq .Values.kind "RayService")) -}}
{{- if .Values.image.digest -}}
{{ $repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ $repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "asr-serve.serviceAccount" -}}
{{- if .Values.serviceAccount.name -}}
{{ .Values.serviceAccount.name }}
{{- else if .Values.serviceAccount.create -}}
{{ include "asr-serve.name" . }}
{{- else -}}
default
{{- end -}}
{{- end -}}

{{- /* Settings of the server with those that follow from the rest of the values, as JSON. */ -}}
{{- define "asr-serve.settings" -}}
{{- $secrets := .Values.secrets -}}
{{- $settings := deepCopy .Values.settings -}}
{{- $_ := set $settings "host" "0.0.0.0" -}}
{{- $_ := set $settings "port" 8000 -}}
{{- if $secrets.apiKeys.name -}}
{{- $_ := set $settings "api_keys_file" (printf "/etc/asr-serve/api-keys/%s" $secrets.apiKeys.key) -}}
{{- end -}}
{{- if $secrets.adminKeys.name -}}
{{- $_ := set $settings "admin_keys_file" (printf "/etc/asr-serve/admin-keys/%s" $secrets.adminKeys.key) -}}
{{- end -}}
{{- if $secrets.tls.name -}}
{{- $_ := set $settings "tls_cert" "/etc/asr-serve/tls/tls.crt" -}}
{{- $_ := set $settings "tls_key" "/etc/asr-serve/tls/tls.key" -}}
{{- end -}}
{{- $sessions := $settings.sessions | default dict -}}
{{- if .Values.redis.url -}}
{{- $_ := set $sessions "redis_url" .Values.redis.url -}}
{{- if $secrets.redisPassword.name -}}
{{- $_ := set $sessions "redis_password_file" (printf "/etc/asr-serve/redis-password/%s" $secrets.redisPassword.key) -}}
{{- end -}}
{{- if $secrets.sessionKeys.name -}}
{{- $_ := set $sessions "key_file" (printf "/etc/asr-serve/session-keys/%s" $secrets.sessionKeys.key) -}}
{{- end -}}
{{- else if or $secrets.redisPassword.name $secrets.sessionKeys.name $settings.sessions -}}
{{- fail "secrets.redisPassword, secrets.sessionKeys and settings.sessions are of sessions in Redis: set redis.url too, or leave them out" -}}
{{- end -}}
{{- if $sessions -}}
{{- $_ := set $settings "sessions" $sessions -}}
{{- end -}}
{{- toJson $settings -}}
{{- end -}}

{{- /* A value in TOML, of which JSON's texts, numbers, booleans and lists are a part. toToml would make 8000 a 8000.0. */ -}}
{{- define "asr-serve.tomlValue" -}}
{{- if kindIs "map" . -}}
{ {{ range $i, $name := keys . | sortAlpha }}{{ if $i }}, {{ end }}{{ toJson $name }} = {{ toJson (get $ $name) }}{{ end }} }
{{- else -}}
{{ toJson . | replace "\x7f" "\\u007f" }}
{{- end -}}
{{- end -}}

{{- /* The settings as the server's TOML file. */ -}}
{{- define "asr-serve.toml" -}}
{{- $settings := include "asr-serve.settings" . | fromJson -}}
{{- /* A pod's disk ends with it, and the next request comes to another pod: files and batches would be lost. */ -}}
{{- if not (hasKey $settings "batch") -}}
{{- $_ := set $settings "batch" (dict "enabled" false) -}}
{{- end -}}
{{- $tables := list "engine" "sessions" "webrtc" "governance" "batch" -}}
{{- range $name := keys $settings | sortAlpha -}}
{{- $value := get $settings $name -}}
{{- if and (not (has $name $tables)) (not (kindIs "invalid" $value)) }}
{{ $name }} = {{ include "asr-serve.tomlValue" $value }}
{{- end -}}
{{- end -}}
{{- range $table := $tables -}}
{{- if hasKey $settings $table }}

[{{ $table }}]
{{- $values := get $settings $table -}}
{{- range $name := keys $values | sortAlpha -}}
{{- $value := get $values $name -}}
{{- if not (kindIs "invalid" $value) }}
{{ $name }} = {{ include "asr-serve.tomlValue" $value }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Seconds that a server takes after SIGTERM at most: drain_s, and what it has to close. */ -}}
{{- define "asr-serve.stopSeconds" -}}
{{- $drain := 30 -}}
{{- if hasKey .Values.settings "drain_s" -}}
{{- $drain = get .Values.settings "drain_s" -}}
{{- end -}}
{{- add (ceil $drain | int) 15 -}}
{{- end -}}

{{- define "asr-serve.volumeMounts" -}}
{{- range $folder, $secret := dict "api-keys" .Values.secrets.apiKeys "admin-keys" .Values.secrets.adminKeys "tls" .Values.secrets.tls "redis-password" .Values.secrets.redisPassword "session-keys" .Values.secrets.sessionKeys }}
{{- if $secret.name }}
- {name: {{ $folder }}, mountPath: /etc/asr-serve/{{ $folder }}, readOnly: true}
{{- end }}
{{- end }}
{{- if .Values.weights.claim }}
- {name: weights, mountPath: {{ .Values.weights.path }}, readOnly: true}
{{- end }}
- {name: cache, mountPath: /var/cache/asr-serve}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- if .Values.hugePages.amount }}
- {name: hugepages, mountPath: /dev/hugepages}
{{- end }}
{{- end -}}

{{- define "asr-serve.volumes" -}}
{{- range $folder, $secret := dict "api-keys" .Values.secrets.apiKeys "admin-keys" .Values.secrets.adminKeys "tls" .Values.secrets.tls "redis-password" .Values.secrets.redisPassword "session-keys" .Values.secrets.sessionKeys }}
{{- if $secret.name }}
- name: {{ $folder }}
  secret: {secretName: {{ $secret.name }}, defaultMode: 0440}
{{- end }}
{{- end }}
{{- if .Values.weights.claim }}
- name: weights
  persistentVolumeClaim: {claimName: {{ .Values.weights.claim }}, readOnly: true}
{{- end }}
- name: cache
  emptyDir: {sizeLimit: {{ .Values.cache.sizeLimit }}}
- name: tmp
  emptyDir: {}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory }}}
{{- if .Values.hugePages.amount }}
- name: hugepages
  emptyDir: {medium: HugePages-{{ .Values.hugePages.size }}}
{{- end }}
{{- end -}}

{{- /* Resources of a pod that computes, with its GPUs and huge pages, which are requested as much as they are limited. */ -}}
{{- define "asr-serve.resources" -}}
{{- $requests := deepCopy (.Values.resources.requests | default dict) -}}
{{- $limits := deepCopy (.Values.resources.limits | default dict) -}}
{{- if .Values.gpu.count -}}
{{- $_ := set $limits .Values.gpu.resource (.Values.gpu.count | int) -}}
{{- end -}}
{{- if .Values.hugePages.amount -}}
{{- $_ := set $limits (printf "hugepages-%s" .Values.hugePages.size) .Values.hugePages.amount -}}
{{- $_ := set $requests (printf "hugepages-%s" .Values.hugePages.size) .Values.hugePages.amount -}}
{{- end -}}
{{- toYaml (dict "requests" $requests "limits" $limits) -}}
{{- end -}}

{{- /* Where a pod that computes may run. */ -}}
{{- define "asr-serve.placement" -}}
{{- $nodes := deepCopy .Values.nodeSelector -}}
{{- $tolerations := .Values.tolerations -}}
{{- if .Values.gpu.count -}}
{{- $nodes = merge $nodes .Values.gpu.nodeSelector -}}
{{- $tolerations = concat $tolerations .Values.gpu.tolerations -}}
{{- end -}}
{{- with $nodes }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "asr-serve.env" -}}
- {name: ASR_SERVE_CACHE, value: /var/cache/asr-serve}
- {name: HOME, value: /tmp}
- {name: PYTHONUNBUFFERED, value: "1"}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* Steps of an autoscaler: out by two at once, in by one after five minutes. */ -}}
{{- define "asr-serve.scaling" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies:
    - {type: Pods, value: 2, periodSeconds: 30}
scaleDown:
  stabilizationWindowSeconds: 300
  policies:
    - {type: Pods, value: 1, periodSeconds: 300}
{{- end -}}

{{- /* 80 % of the sessions of an engine. */ -}}
{{- define "asr-serve.sessions" -}}
{{- $engine := .Values.settings.engine | default dict -}}
{{- div (mul (get $engine "max_sessions" | default 1024 | int) 8) 10 -}}
{{- end -}}
