{{- define "kvroute.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end -}}
{{- end -}}

{{- define "kvroute.selector" -}}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: gateway
{{- end -}}

{{- define "kvroute.redisSelector" -}}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: sharing
{{- end -}}

{{- define "kvroute.commonLabels" -}}
app.kubernetes.io/name: kvroute
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "kvroute.metadata" -}}
name: {{ include "kvroute.name" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "kvroute.commonLabels" . | nindent 2 }}
  {{- include "kvroute.selector" . | nindent 2 }}
{{- end -}}

{{- define "kvroute.redisMetadata" -}}
name: {{ include "kvroute.name" . }}-sharing
namespace: {{ .Release.Namespace }}
labels:
  {{- include "kvroute.commonLabels" . | nindent 2 }}
  {{- include "kvroute.redisSelector" . | nindent 2 }}
{{- end -}}

{{- define "kvroute.keysSecret" -}}
{{ .Values.keysSecret | default (printf "%s-keys" (include "kvroute.name" .)) }}
{{- end -}}

{{- define "kvroute.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "kvroute.name" .) }}
{{- end -}}

{{- /* "true" if several gateways share what they know. */ -}}
{{- define "kvroute.shares" -}}
{{- if and .Values.sharing.enabled (or (gt (int .Values.replicas) 1) .Values.autoscaling.enabled) }}true{{ end -}}
{{- end -}}

{{- /* "true" if the chart starts the Redis for that. */ -}}
{{- define "kvroute.ownRedis" -}}
{{- if and (include "kvroute.shares" .) (not .Values.sharing.url) (not .Values.sharing.urlSecret.name) }}true{{ end -}}
{{- end -}}

{{- /* kvroute.yaml: the chart's options, and over them those of `config`. */ -}}
{{- define "kvroute.config" -}}
{{- $name := include "kvroute.name" . -}}
{{- $picker := eq .Values.door "picker" -}}
{{- $server := dict "host" "0.0.0.0" "port" (ternary 9002 8080 $picker) "shutdown_delay_s" 5 "drain_timeout_s" 120 -}}
{{- if .Values.apiKeys.name }}{{ $_ := set $server "api_keys_file" "/run/secrets/kvroute/api-keys" }}{{ end -}}
{{- if .Values.clientKeys.name }}{{ $_ := set $server "client_keys" (dict "file" "/run/secrets/kvroute/client-keys") }}{{ end -}}
{{- if .Values.tls.secretName -}}
{{- $tls := dict "cert_file" "/etc/kvroute-tls/tls.crt" "key_file" "/etc/kvroute-tls/tls.key" -}}
{{- if .Values.tls.clientCa }}{{ $_ := set $tls "client_ca_file" "/etc/kvroute-tls/ca.crt" }}{{ end -}}
{{- $_ := set $server "tls" $tls -}}
{{- end -}}
{{- $fleet := dict -}}
{{- if and .Values.workers.labels $picker -}}
{{- /* Envoy and the picker must mean the same workers and ports: both read the InferencePool. */ -}}
{{- if not (has .Values.workers.namespace (list "" .Release.Namespace)) }}{{ fail "workers.namespace: an InferencePool selects pods of its own namespace, so install the chart with door picker in that of the workers" }}{{ end -}}
{{- $_ := set $fleet "kubernetes" (dict "enabled" true "namespace" .Release.Namespace "pool" $name) -}}
{{- else if .Values.workers.labels -}}
{{- $pairs := list -}}
{{- range $key, $value := .Values.workers.labels }}{{ $pairs = append $pairs (printf "%s=%s" $key $value) }}{{ end -}}
{{- $found := dict "enabled" true "namespace" (.Values.workers.namespace | default .Release.Namespace) "selector" (join "," $pairs) "port" .Values.workers.port -}}
{{- $_ := set $fleet "kubernetes" $found -}}
{{- else if .Values.workers.urls -}}
{{- $_ := set $fleet "workers" .Values.workers.urls -}}
{{- else if not .Values.config.fleet -}}
{{- fail "no workers: set workers.labels, workers.urls or config.fleet" -}}
{{- end -}}
{{- if and $picker (gt (int (dig "server" "processes" 1 .Values.config)) 1) }}{{ fail "config.server.processes: must be 1 with door picker, because an endpoint picker is one process; set replicas" }}{{ end -}}
{{- if hasKey (.Values.config.server | default dict) "port" }}{{ fail "config.server.port: the chart sets it; set service.port" }}{{ end -}}
{{- if hasKey (.Values.config.server | default dict) "tls" }}{{ fail "config.server.tls: the chart sets it; set tls" }}{{ end -}}
{{- /* `config` becomes a ConfigMap, which many may read. */ -}}
{{- if hasKey (.Values.config.server | default dict) "api_keys" }}{{ fail "config.server.api_keys: a ConfigMap is no place for keys; set apiKeys" }}{{ end -}}
{{- if hasKey (.Values.config.admin | default dict) "api_key" }}{{ fail "config.admin.api_key: a ConfigMap is no place for a key; set keysSecret" }}{{ end -}}
{{- if hasKey (.Values.config.sharing | default dict) "key" }}{{ fail "config.sharing.key: a ConfigMap is no place for a key; set keysSecret" }}{{ end -}}
{{- if hasKey (.Values.config.sharing | default dict) "password" }}{{ fail "config.sharing.password: a ConfigMap is no place for a password; set sharing.urlSecret" }}{{ end -}}
{{- if hasKey (.Values.config.fleet | default dict) "worker_api_key" }}{{ fail "config.fleet.worker_api_key: a ConfigMap is no place for a key; set config.fleet.worker_api_key_file to a file of extraVolumes" }}{{ end -}}
{{- $lmcache := .Values.config.lmcache | default dict -}}
{{- if hasKey ($lmcache.l2 | default dict) "redis_password" }}{{ fail "config.lmcache.l2.redis_password: a ConfigMap is no place for a password; set redis_password_file to a file of extraVolumes" }}{{ end -}}
{{- if hasKey ($lmcache.tierd | default dict) "key" }}{{ fail "config.lmcache.tierd.key: a ConfigMap is no place for a key; set key_file to a file of extraVolumes" }}{{ end -}}
{{- if regexMatch "://[^/@]*:[^/@]+@" (dig "redis_url" "" ($lmcache.l2 | default dict)) }}{{ fail "config.lmcache.l2.redis_url: a ConfigMap is no place for a password; set redis_url_file to a file of extraVolumes" }}{{ end -}}
{{- range $place, $url := dict "sharing.url" .Values.sharing.url "config.sharing.url" (dig "url" "" (.Values.config.sharing | default dict)) -}}
{{- if regexMatch "://[^/@]*:[^/@]+@" ($url | default "") }}{{ fail (printf "%s: a ConfigMap is no place for a password; set sharing.urlSecret" $place) }}{{ end -}}
{{- end -}}
{{- if hasKey (.Values.config.epp | default dict) "http_port" }}{{ fail "config.epp.http_port: the chart sets it" }}{{ end -}}
{{- $service := printf "%s.%s" $name .Release.Namespace -}}
{{- $hosts := concat (list $name $service (printf "%s.svc" $service) (printf "%s.svc.cluster.local" $service)) .Values.ingress.hosts .Values.httpRoute.hostnames -}}
{{- $admin := dict "api_key_file" "/run/secrets/kvroute/admin-key" "allowed_hosts" $hosts -}}
{{- $config := dict "server" $server "fleet" $fleet "admin" $admin "logging" (dict "format" "json") -}}
{{- if $picker }}{{ $_ := set $config "epp" (dict "http_port" 9090) }}{{ end -}}
{{- if include "kvroute.shares" . -}}
{{- $sharing := dict "key_file" "/run/secrets/kvroute/sharing-key" "fleet" $name -}}
{{- if .Values.sharing.urlSecret.name }}{{ $_ := set $sharing "url_file" "/run/secrets/kvroute/sharing-url" }}
{{- else if .Values.sharing.url }}{{ $_ := set $sharing "url" .Values.sharing.url }}
{{- else -}}
{{- $_ := set $sharing "url" (printf "redis://%s-sharing:6379" $name) -}}
{{- $_ := set $sharing "password_file" "/run/secrets/kvroute/redis-password" -}}
{{- end -}}
{{- $_ := set $config "sharing" $sharing -}}
{{- end -}}
{{- toYaml (mergeOverwrite $config (deepCopy .Values.config)) -}}
{{- end -}}

{{- /* A probe of a path: HTTP, HTTPS, or only a connection if clients need a certificate. */ -}}
{{- define "kvroute.probe" -}}
{{- if .root.Values.tls.clientCa }}
tcpSocket: {port: http}
{{- else }}
httpGet:
  path: {{ .path }}
  port: http
  {{- if .root.Values.tls.secretName }}
  scheme: HTTPS
  {{- end }}
{{- end }}
{{- end -}}

{{- define "kvroute.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "kvroute.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
