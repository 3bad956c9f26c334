{{- define "mlx.name" -}}
{{- $whole := printf "%s-%s" .Release.Name .Chart.Name -}}
{{- contains .Chart.Name .Release.Name | ternary .Release.Name $whole | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "mlx.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "mlx.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* The image of a process: (list . "router") */}}
{{- define "mlx.image" -}}
{{- $root := index . 0 -}}
{{- with $root.Values.image.registry }}{{ . }}/{{ end -}}
mlx-lm-server-{{ index . 1 }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- end }}

{{- define "mlx.curveSecret" -}}
{{- if .Values.curve.existingSecret }}{{ .Values.curve.existingSecret }}
{{- else if .Values.curve.files }}{{ include "mlx.name" . }}-curve
{{- else }}{{ fail "curve.existingSecret (or curve.files): the keys of the sockets, made by `mlx-lm-server keys`" }}{{ end }}
{{- end }}

{{- define "mlx.secret" -}}
{{- .Values.secrets.existingSecret | default (printf "%s-secrets" (include "mlx.name" .)) }}
{{- end }}

{{- define "mlx.apiKeySecret" -}}
{{- if .Values.apiKeys.existingSecret }}{{ .Values.apiKeys.existingSecret }}
{{- else if .Values.apiKeys.lines }}{{ include "mlx.name" . }}-api-keys{{ end }}
{{- end }}

{{/* A variable from the optional Secret: (list . "MLX_LM_SERVER_ADMIN_KEY" "admin-key") */}}
{{- define "mlx.secretVariable" -}}
- name: {{ index . 1 }}
  valueFrom:
    secretKeyRef: { name: {{ include "mlx.secret" (index . 0) }}, key: {{ index . 2 }}, optional: true }
{{- end }}

{{/* What all pods have in common. */}}
{{- define "mlx.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false  # a service named mlx-lm-server would set MLX_LM_SERVER_PORT
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: { type: RuntimeDefault }
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "mlx.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
{{- end }}

{{/*
Keys as files that their user alone can read, as the processes want them: a Secret's own are
readable by the group too. The list of those that may join stays a link, so that it can change.
(list . IMAGE)
*/}}
{{- define "mlx.keysContainer" -}}
- name: keys
  image: {{ index . 1 }}
  imagePullPolicy: {{ (index . 0).Values.image.pullPolicy }}
  command:
    - sh
    - -ec
    - |
      for key in /secret/*.key /secret/*.secret; do install -m 0400 "$key" /curve/; done
      ln -sf /secret/allowed /curve/allowed
  volumeMounts:
    - { name: curve-secret, mountPath: /secret, readOnly: true }
    - { name: curve, mountPath: /curve }
  resources:
    requests: { cpu: 10m, memory: 16Mi }
    limits: { memory: 64Mi }
  {{- include "mlx.container" (index . 0) | nindent 2 }}
{{- end }}

{{- define "mlx.mounts" -}}
- { name: curve, mountPath: /curve, readOnly: true }
- { name: curve-secret, mountPath: /secret, readOnly: true }
- { name: tmp, mountPath: /tmp }
- { name: run, mountPath: /run/mlx-lm-server }
{{- end }}

{{/* The volumes of these mounts: (list . "engine.key" "engine.secret" ...) */}}
{{- define "mlx.volumes" -}}
- name: curve-secret
  secret:
    secretName: {{ include "mlx.curveSecret" (index . 0) }}
    items:
      {{- range rest . }}
      - { key: {{ . }}, path: {{ . }} }
      {{- end }}
- name: curve
  emptyDir: { medium: Memory, sizeLimit: 1Mi }
- name: tmp
  emptyDir: {}
- name: run
  emptyDir: {}
{{- end }}
