//! The settings as the spec of a document `IPAMConfiguration`.

use serde_json::{Map, Value, json};

use super::config::{AddressPersistence, IpamConfig};
use super::spec_field::{SpecField, spec_fields};
use crate::DocumentError;

/// The bounds of Calico's schema. Its `ipam configure`, and ours, take up to 5,000 seconds.
const MAX_MAX_BLOCKS: u32 = 1_000_000;
const MAX_COOLDOWN_SECONDS: u32 = 1_200;

type Object = Map<String, Value>;

spec_fields! {
    /// The fields that the spec of the settings can have.
    pub const SETTINGS_FIELDS:
    STRICT = "strictAffinity";
    AUTO = "autoAllocateBlocks";
    MAX_BLOCKS = "maxBlocksPerHost";
    PERSISTENCE = "kubeVirtVMAddressPersistence";
    COOLDOWN = "ipCooldownSeconds";
}

impl IpamConfig {
    /// Sets all fields to what a spec says, and those that it does not have to their defaults.
    ///
    /// # Errors
    /// [`DocumentError::Invalid`] for a field of another type or out of its bounds, and for settings that contradict each
    /// other.
    pub fn with_spec(self, spec: &Object) -> Result<Self, DocumentError> {
        let persistence = match PERSISTENCE.get(spec) {
            None => AddressPersistence::Enabled,
            Some(value) if value == "Enabled" => AddressPersistence::Enabled,
            Some(value) if value == "Disabled" => AddressPersistence::Disabled,
            Some(value) => return Err(wrong(PERSISTENCE, value, "must be Enabled or Disabled")),
        };
        let settings = self
            .with_strict_affinity(switch(spec, STRICT, false)?)
            .with_auto_allocate_blocks(switch(spec, AUTO, true)?)
            .with_max_blocks_per_host(number(spec, MAX_BLOCKS, MAX_MAX_BLOCKS)?)
            .with_cooldown_seconds(number(spec, COOLDOWN, MAX_COOLDOWN_SECONDS)?)
            .with_address_persistence(persistence);
        settings.check().map_err(|error| DocumentError::Invalid(error.to_string()))?;
        Ok(settings)
    }

    /// The spec that says these settings, with all its fields.
    pub fn spec(&self) -> Value {
        json!({
            STRICT.name: self.strict_affinity(),
            AUTO.name: self.auto_allocate_blocks(),
            MAX_BLOCKS.name: self.max_blocks_per_host(),
            PERSISTENCE.name: self.address_persistence().as_str(),
            COOLDOWN.name: self.cooldown_seconds().max(0),
        })
    }
}

fn switch(spec: &Object, field: SpecField, default: bool) -> Result<bool, DocumentError> {
    match field.get(spec) {
        None => Ok(default),
        Some(value) => value.as_bool().ok_or_else(|| wrong(field, value, "must be true or false")),
    }
}

fn number(spec: &Object, field: SpecField, max: u32) -> Result<u32, DocumentError> {
    let Some(value) = field.get(spec) else { return Ok(0) };
    let number = value.as_u64().and_then(|number| u32::try_from(number).ok()).filter(|number| *number <= max);
    number.ok_or_else(|| wrong(field, value, &format!("must be a number from 0 to {max}")))
}

fn wrong(field: SpecField, value: &Value, reason: &str) -> DocumentError {
    let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    DocumentError::field(format_args!("IPAMConfiguration.{}", field.name), value, reason)
}
