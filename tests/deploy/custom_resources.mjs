// Reads a list of manifests from stdin and says of each, as JSON, what the schema of its kind has against it.
// Argument: the folder with the packages.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const packages = { "gateway.networking.k8s.io": "gateway-api", "keda.sh": "keda", "monitoring.coreos.com": "prometheus-operator" };
const verdicts = [];
for (const manifest of JSON.parse(readFileSync(0, "utf8"))) {
  const [group, version] = manifest.apiVersion.split("/");
  const file = `${process.argv[2]}/@kubernetes-models/${packages[group]}/${group}/${version}/${manifest.kind}.js`;
  const found = await import(pathToFileURL(file));
  const kind = found[manifest.kind] ?? found.default[manifest.kind];
  try {
    new kind(manifest).validate();
    verdicts.push("");
  } catch (error) {
    verdicts.push(String(error.message));
  }
}
console.log(JSON.stringify(verdicts));
