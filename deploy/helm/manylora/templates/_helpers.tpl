{{- define "manylora.fullname" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if contains $name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}
{{- end }}

{{- define "manylora.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "manylora.fullname" .) .Values.serviceAccount.name }}
{{- else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{/* The router's account, which may look for pods where it is told to; made beside the others' one. */}}
{{- define "manylora.routerAccount" -}}
{{- $watches := include "manylora.watched" . | fromJsonArray -}}
{{- include "manylora.serviceAccount" . }}{{ if and $watches .Values.serviceAccount.create }}-router{{ end }}
{{- end }}

{{/* The router's sources that are pods or pools, as a list in JSON of {kind, namespace, name}. */}}
{{- define "manylora.watched" -}}
{{- $found := list -}}
{{- range .Values.router.backends -}}
{{- if regexMatch "^(pods|pool):" . -}}
{{- $parts := regexSplit "[:/]" (regexReplaceAll "#.*$" . "") 3 -}}
{{- $found = append $found (dict "kind" (index $parts 0) "namespace" (index $parts 1) "name" (index $parts 2)) -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end }}

{{/* Labels of a component: (list . "server"). */}}
{{- define "manylora.selector" -}}
{{- $top := index . 0 -}}
app.kubernetes.io/name: {{ default $top.Chart.Name $top.Values.nameOverride }}
app.kubernetes.io/instance: {{ $top.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "manylora.labels" -}}
{{- $top := index . 0 -}}
{{ include "manylora.selector" . }}
app.kubernetes.io/version: {{ $top.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $top.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $top.Chart.Name $top.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* The image of a component. */}}
{{- define "manylora.image" -}}
{{- $top := index . 0 -}}
{{- $image := mergeOverwrite (deepCopy $top.Values.image) (index $top.Values (index . 1)).image -}}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}
{{- else }}{{ $image.repository }}:{{ default $top.Chart.AppVersion $image.tag }}{{ end }}
{{- end }}

{{/* A pod's fields that all components have. */}}
{{- define "manylora.pod" -}}
{{- $top := index . 0 -}}
{{- $own := index $top.Values (index . 1) -}}
{{- $watches := and (eq (index . 1) "router") (include "manylora.watched" $top | fromJsonArray) }}
serviceAccountName: {{ include (ternary "manylora.routerAccount" "manylora.serviceAccount" (eq (index . 1) "router")) $top }}
automountServiceAccountToken: {{ or $top.Values.serviceAccount.automountToken (not (empty $watches)) }}
enableServiceLinks: false
# What a pod needs to end: load balancers forget it, answers under way end, and the process leaves.
terminationGracePeriodSeconds: {{ add $top.Values.preStopSeconds $own.drainSeconds 10 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" }}
{{- with index $own $field }}
{{ $field }}: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with $top.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* A container's fields that all components have. */}}
{{- define "manylora.container" -}}
{{- $top := index . 0 -}}
{{- $own := index $top.Values (index . 1) -}}
{{- $resources := deepCopy $own.resources -}}
{{- if $own.gpus -}}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict $own.gpuResource (toString $own.gpus))) -}}
{{- end -}}
image: {{ include "manylora.image" . }}
imagePullPolicy: {{ $top.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
ports:
  - {name: http, containerPort: 8000}
lifecycle:
  preStop:
    sleep: {seconds: {{ $top.Values.preStopSeconds }}}
resources: {{ toYaml $resources | nindent 2 }}
{{- $tls := dig "tls" "secretName" "" $own }}
readinessProbe:
  {{- include "manylora.get" (list "/health" $tls) | nindent 2 }}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
livenessProbe:
  {{- include "manylora.get" (list "/version" $tls) | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{/* GET of a probe: (list "/health" hasTls). */}}
{{- define "manylora.get" -}}
httpGet: {path: {{ index . 0 }}, port: http{{ if index . 1 }}, scheme: HTTPS{{ end }}}
{{- end }}

{{/* A variable from the Secret of keys: (list . "NAME" "key"). */}}
{{- define "manylora.key" -}}
{{- $top := index . 0 -}}
{{- with $top.Values.keys.existingSecret }}
- name: {{ index $ 1 }}
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: {{ index $ 2 }}, optional: true}
{{- end }}
{{- end }}

{{/* A disruption budget's one bound; maxUnavailable is the default, which values of one's own do not remove. */}}
{{- define "manylora.budget" -}}
{{- toYaml (ternary (pick . "minAvailable") . (hasKey . "minAvailable")) }}
{{- end }}
