{{/* Names, labels and pieces that several manifests share. */}}

{{- define "penstock.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- (contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name)) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that never change: what selectors use. Argument: (list $ component) */}}
{{- define "penstock.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "penstock.labels" -}}
{{- $root := index . 0 -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: penstock
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of pods: none that a new chart changes, since that would start every pod anew. */}}
{{- define "penstock.podLabels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/part-of: penstock
{{- with (index . 0).Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Argument: (list $ image suffix) */}}
{{- define "penstock.image" -}}
{{- $root := index . 0 -}}{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default (printf "%s-%s" $root.Chart.AppVersion (index . 2)) $image.tag }}
{{- end -}}
{{- end -}}

{{- define "penstock.secretName" -}}
{{- .Values.secret.create | ternary (include "penstock.fullname" .) .Values.secret.existingSecret -}}
{{- end -}}

{{/* Argument: (list $ component) */}}
{{- define "penstock.serviceAccount" -}}
{{- $root := index . 0 -}}
{{- $root.Values.serviceAccounts.create | ternary (printf "%s-%s" (include "penstock.fullname" $root) (index . 1)) "default" -}}
{{- end -}}

{{/* An environment variable from the Secret. Argument: (list $ variable key) */}}
{{- define "penstock.secretEnv" -}}
- name: {{ index . 1 }}
  valueFrom:
    secretKeyRef:
      name: {{ include "penstock.secretName" (index . 0) }}
      key: {{ index . 2 }}
{{- end -}}

{{/* Variables of gateways and controllers. */}}
{{- define "penstock.storeEnv" -}}
- {name: PENSTOCK_HOME, value: /var/lib/penstock}
{{ include "penstock.secretEnv" (list . "PENSTOCK_GATEWAY_SECRET" "gateway-secret") }}
{{- if eq .Values.store.kind "postgresql" }}
{{ include "penstock.secretEnv" (list . "PENSTOCK_STORE" "store-url") }}
{{- end }}
{{- end -}}

{{/* Fields that every pod has. Argument: (list $ values), with nodeSelector, tolerations, affinity and the rest */}}
{{- define "penstock.placement" -}}
{{- $root := index . 0 -}}{{- $values := index . 1 -}}
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Pods over zones and machines, as far as that is possible. Argument: (list labels zoneKey) */}}
{{- define "penstock.spread" -}}
{{- $labels := index . 0 -}}
{{- range list (index . 1) "kubernetes.io/hostname" -}}
- maxSkew: 1
  topologyKey: {{ . }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- $labels | nindent 6 }}
{{ end }}
{{- end -}}

{{- define "penstock.pdbVersion" -}}
{{- semverCompare ">=1.21-0" .Capabilities.KubeVersion.Version | ternary "policy/v1" "policy/v1beta1" -}}
{{- end -}}

{{- define "penstock.hpaVersion" -}}
{{- semverCompare ">=1.23-0" .Capabilities.KubeVersion.Version | ternary "autoscaling/v2" "autoscaling/v2beta2" -}}
{{- end -}}

{{- define "penstock.scheme" -}}
{{- if .Values.gateway.tls.secretName }}https{{ else }}http{{ end -}}
{{- end -}}

{{/* Name in the certificate of replicas. */}}
{{- define "penstock.replicaServerName" -}}
{{- default (printf "%s-replica.%s.svc" (include "penstock.fullname" .) .Release.Namespace) .Values.replicaTls.serverName -}}
{{- end -}}

{{/* The CA of replicas, without their private key, for those who ask them: a volume and where it is mounted. */}}
{{- define "penstock.replicaCaVolume" -}}
{{- with .Values.replicaTls.secretName -}}
- name: replica-tls
  secret: {secretName: {{ . }}, items: [{key: ca.crt, path: ca.crt}]}
{{- end -}}
{{- end -}}

{{- define "penstock.replicaCaMount" -}}
{{- if .Values.replicaTls.secretName -}}
- {name: replica-tls, mountPath: /run/penstock/replica-tls, readOnly: true}
{{- end -}}
{{- end -}}

{{/* Seconds that a gateway's streams have after SIGTERM. tests/deploy holds it equal to the gateway's own. */}}
{{- define "penstock.gatewayDrainSeconds" -}}30{{- end -}}

{{/* The same of an Endpoint Picker's streams, unless endpoint_picker.drain_s says otherwise. */}}
{{- define "penstock.endpointPickerDrainSeconds" -}}300{{- end -}}

{{- /* "true" if a pool's replicas are over several nodes each, and so LeaderWorkerSets */ -}}
{{- define "penstock.hasGroups" -}}
{{- $found := "" -}}
{{- range .Values.pools -}}
{{- $own := default dict (default dict .settings).kubernetes -}}
{{- if gt (int (default 1 $own.nodes)) 1 }}{{ $found = "true" }}{{ end -}}
{{- end -}}
{{- $found -}}
{{- end -}}
