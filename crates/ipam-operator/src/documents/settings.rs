//! The settings in the form of a document: `IPAMConfiguration`, named `default`.

use ipam_core::model::{AddressPersistence, IpamConfig};
use kv::Revision;
use serde_json::{Value, json};

use super::build::{inner, refuse_unknown};
use super::{API_VERSION, DocumentError, DocumentKind, Manifest, Object, SETTINGS_NAME};

const STRICT: &str = "strictAffinity";
const AUTO: &str = "autoAllocateBlocks";
const MAX_BLOCKS: &str = "maxBlocksPerHost";
const PERSISTENCE: &str = "kubeVirtVMAddressPersistence";
const COOLDOWN: &str = "ipCooldownSeconds";
/// The bounds of Calico's schema. Its `ipam configure`, and ours, take up to 5,000 seconds.
const MAX_MAX_BLOCKS: u32 = 1_000_000;
const MAX_COOLDOWN_SECONDS: u32 = 1_200;
pub(super) const FIELDS: [&str; 5] = [STRICT, AUTO, MAX_BLOCKS, PERSISTENCE, COOLDOWN];

/// The settings that a document says, on top of the stored ones: what it does not say is as if it had never been set.
pub(super) fn settings(manifest: &Manifest, stored: IpamConfig) -> Result<IpamConfig, DocumentError> {
    let metadata = manifest.metadata();
    for field in ["labels", "annotations"] {
        if inner(&metadata, field).is_some_and(|fields| !fields.is_empty()) {
            let reason = format!("the settings are stored without metadata.{field}: leave them away");
            return Err(DocumentError::Invalid(reason));
        }
    }
    let spec = manifest.spec();
    refuse_unknown("", &manifest.document, &["kind", "apiVersion", "metadata", "spec"], None)?;
    refuse_unknown("spec", &spec, &FIELDS, None)?;
    let persistence = match said(&spec, PERSISTENCE) {
        None => AddressPersistence::Enabled,
        Some(value) if value == "Enabled" => AddressPersistence::Enabled,
        Some(value) if value == "Disabled" => AddressPersistence::Disabled,
        Some(value) => return Err(wrong(PERSISTENCE, value, "must be Enabled or Disabled")),
    };
    let settings = stored
        .with_strict_affinity(switch(&spec, STRICT)?.unwrap_or(false))
        .with_auto_allocate_blocks(switch(&spec, AUTO)?.unwrap_or(true))
        .with_max_blocks_per_host(number(&spec, MAX_BLOCKS, MAX_MAX_BLOCKS)?)
        .with_cooldown_seconds(number(&spec, COOLDOWN, MAX_COOLDOWN_SECONDS)?)
        .with_address_persistence(persistence);
    settings.check().map_err(|error| DocumentError::Invalid(error.to_string()))?;
    Ok(settings)
}

/// The settings as a document, whether they are stored or not.
pub(super) fn document(settings: &IpamConfig, version: Option<Revision>) -> Object {
    let persistence = match settings.address_persistence() {
        AddressPersistence::Enabled => "Enabled",
        AddressPersistence::Disabled => "Disabled",
    };
    let mut metadata = Object::new();
    metadata.insert("name".to_owned(), SETTINGS_NAME.into());
    if let Some(version) = version {
        metadata.insert("resourceVersion".to_owned(), version.to_string().into());
    }
    let spec = json!({
        STRICT: settings.strict_affinity(),
        AUTO: settings.auto_allocate_blocks(),
        MAX_BLOCKS: settings.max_blocks_per_host(),
        PERSISTENCE: persistence,
        COOLDOWN: settings.cooldown_seconds().max(0),
    });
    let mut document = Object::new();
    document.insert("kind".to_owned(), DocumentKind::Settings.as_str().into());
    document.insert("apiVersion".to_owned(), API_VERSION.into());
    document.insert("metadata".to_owned(), Value::Object(metadata));
    document.insert("spec".to_owned(), spec);
    document
}

fn switch(spec: &Object, field: &str) -> Result<Option<bool>, DocumentError> {
    match said(spec, field) {
        None => Ok(None),
        Some(value) => value.as_bool().map(Some).ok_or_else(|| wrong(field, value, "must be true or false")),
    }
}

fn number(spec: &Object, field: &str, max: u32) -> Result<u32, DocumentError> {
    let Some(value) = said(spec, field) else { return Ok(0) };
    let number = value.as_u64().and_then(|number| u32::try_from(number).ok()).filter(|number| *number <= max);
    number.ok_or_else(|| wrong(field, value, &format!("must be a number from 0 to {max}")))
}

fn said<'a>(spec: &'a Object, field: &str) -> Option<&'a Value> {
    spec.get(field).filter(|value| !value.is_null())
}

fn wrong(field: &str, value: &Value, reason: &str) -> DocumentError {
    let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    DocumentError::field(format_args!("IPAMConfiguration.{field}"), value, reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipam_core::model::Document;

    fn said_by(spec: Value) -> Result<IpamConfig, DocumentError> {
        let key = ipam_core::model::keys::config();
        let stored = br#"{"strict_affinity":true,"maxBlocksPerHost":3,"later":1}"#;
        let document = json!({"kind": "IPAMConfiguration", "apiVersion": API_VERSION, "metadata": {"name": "default"},
            "spec": spec});
        settings(&Manifest::read(document).unwrap()[0], IpamConfig::decode(&key, stored).unwrap())
    }

    #[test]
    fn what_is_not_said_is_the_default_and_what_is_not_known_stays() {
        let text = |config: IpamConfig| String::from_utf8(config.encode().unwrap().as_bytes().to_vec()).unwrap();
        assert_eq!(
            text(said_by(json!({})).unwrap()),
            r#"{"auto_allocate_blocks":true,"kubeVirtVMAddressPersistence":"Enabled","later":1}"#
        );
        let all = json!({"strictAffinity": true, "autoAllocateBlocks": false, "maxBlocksPerHost": 5,
            "kubeVirtVMAddressPersistence": "Disabled", "ipCooldownSeconds": 60});
        assert!(
            said_by(json!({"strictAffinity": true, "maxBlocksPerHost": 1_000_000, "ipCooldownSeconds": 1_200})).is_ok()
        );
        let config = said_by(all.clone()).unwrap();
        assert_eq!(document(&config, None)["spec"], all);
        assert_eq!(document(&config, Some(Revision::new(7)))["metadata"]["resourceVersion"], "7");
    }

    #[test]
    fn settings_that_cannot_be_are_refused() {
        for (spec, reason) in [
            (json!({"strictAffinity": "yes"}), "IPAMConfiguration.strictAffinity = 'yes' (must be true or false)"),
            (json!({"maxBlocksPerHost": -1}), "must be a number from 0 to 1000000"),
            (json!({"maxBlocksPerHost": 1_000_001}), "must be a number from 0 to 1000000"),
            (
                json!({"ipCooldownSeconds": 1_201}),
                "IPAMConfiguration.ipCooldownSeconds = '1201' (must be a number from 0 to 1200)",
            ),
            (json!({"ipCooldownSeconds": 4_294_967_296_u64}), "must be a number"),
            (json!({"kubeVirtVMAddressPersistence": "On"}), "must be Enabled or Disabled"),
            (json!({"maxBlocksPerHost": 2}), "MaxBlocksPerHost requires StrictAffinity to be enabled"),
            (json!({"autoAllocateBlocks": false}), "Cannot disable 'StrictAffinity' and 'AutoAllocateBlocks'"),
            (json!({"strict": true}), "unknown field \"spec.strict\""),
        ] {
            let error = said_by(spec).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
