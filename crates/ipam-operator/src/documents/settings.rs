//! The settings in the form of a document: `IPAMConfiguration`, named `default`.

use ipam_core::model::{IpamConfig, SETTINGS_FIELDS};
use kv::Revision;
use serde_json::Value;

use super::build::{inner, refuse_unknown};
use super::{API_VERSION, DocumentError, DocumentKind, Manifest, Object, SETTINGS_NAME};

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
    refuse_unknown("spec", &spec, &SETTINGS_FIELDS, None)?;
    stored.with_spec(&spec)
}

/// The settings as a document, whether they are stored or not.
pub(super) fn document(settings: &IpamConfig, version: Option<Revision>) -> Object {
    let mut metadata = Object::new();
    metadata.insert("name".to_owned(), SETTINGS_NAME.into());
    if let Some(version) = version {
        metadata.insert("resourceVersion".to_owned(), version.to_string().into());
    }
    let mut document = Object::new();
    document.insert("kind".to_owned(), DocumentKind::Settings.as_str().into());
    document.insert("apiVersion".to_owned(), API_VERSION.into());
    document.insert("metadata".to_owned(), Value::Object(metadata));
    document.insert("spec".to_owned(), settings.spec());
    document
}

#[cfg(test)]
mod tests {
    use serde_json::json;

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
