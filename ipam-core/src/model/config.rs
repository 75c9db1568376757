//! Defines the IPAM settings that all nodes share, and converts them to and from the spec of an `IPAMConfiguration`
//! document.

use kv::{Key, Value};
use serde_json::{Value as Json, json};

use super::codec::{Document, Field, JsonObject, Malformed, UnknownFields, document, from_json, to_json};
use super::spec::{SpecField, spec_fields};
use crate::DocumentError;

/// Maximum number of blocks of a host if neither the settings nor the request sets a limit.
const DEFAULT_MAX_BLOCKS: u32 = 20;

/// Whether a virtual machine keeps its addresses when its pod is recreated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressPersistence {
    /// The virtual machine keeps its addresses when its pod is recreated (the default).
    Enabled,
    /// The virtual machine gets new addresses when its pod is recreated.
    Disabled,
}

impl AddressPersistence {
    fn as_str(self) -> &'static str {
        match self {
            Self::Enabled => "Enabled",
            Self::Disabled => "Disabled",
        }
    }
}

/// The error for IPAM settings that contradict each other. The messages of [`ContradictorySettings`] equal Calico's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ContradictorySettings {
    /// Strict affinity and the automatic claiming of blocks are both off, which Calico forbids.
    #[error("Cannot disable 'StrictAffinity' and 'AutoAllocateBlocks' at the same time")]
    NeitherStrictNorAuto,
    /// A limit of blocks per host is set without strict affinity, so a host at the limit would borrow addresses from
    /// other hosts' blocks.
    #[error("MaxBlocksPerHost requires StrictAffinity to be enabled")]
    LimitWithoutStrict,
}

document! {
    /// The stored document with the IPAM settings.
    ///
    /// Calico omits fields that are zero or false, so a stored `{}` forbids claiming new blocks. If no document with
    /// settings is stored, [`IpamConfig::default`] applies.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct IpamConfig {
        strict_affinity: Field<bool> = "strict_affinity",
        auto_allocate_blocks: Field<bool> = "auto_allocate_blocks",
        max_blocks_per_host: Field<i64> = "maxBlocksPerHost",
        kubevirt_persistence: Field<String> = "kubeVirtVMAddressPersistence",
        cooldown_seconds: Field<i64> = "ipCooldownSeconds",
    }
}

impl Default for IpamConfig {
    /// Returns the settings that apply when no settings are stored. The default settings allow borrowing and new
    /// blocks, and have no cooldown.
    fn default() -> Self {
        Self {
            strict_affinity: Field::Absent,
            auto_allocate_blocks: Field::Is(true),
            max_blocks_per_host: Field::Absent,
            kubevirt_persistence: Field::Is("Enabled".to_owned()),
            cooldown_seconds: Field::Absent,
            extra: UnknownFields::default(),
        }
    }
}

impl IpamConfig {
    /// True if a host takes addresses only from its own blocks.
    pub fn strict_affinity(&self) -> bool {
        self.strict_affinity.or_zero()
    }

    /// True if a host may claim new blocks automatically.
    pub fn auto_allocate_blocks(&self) -> bool {
        self.auto_allocate_blocks.or_zero()
    }

    /// Returns the number of blocks that a host may claim: the smaller of the configured and the requested limit. A
    /// block limit of 0 counts as unset. If neither the settings nor the request sets a block limit, the limit is 20.
    pub fn block_limit(&self, requested: u32) -> u32 {
        [self.max_blocks_per_host(), requested]
            .into_iter()
            .filter(|limit| *limit != 0)
            .min()
            .unwrap_or(DEFAULT_MAX_BLOCKS)
    }

    /// Returns the cooldown of a released address, in seconds; 0 or less for no cooldown.
    pub fn cooldown_seconds(&self) -> i64 {
        self.cooldown_seconds.or_zero()
    }

    /// Returns whether a virtual machine keeps its addresses when its pod is recreated. Assignments ignore the setting
    /// in Margay's IPAM settings. Assignments use the setting of the same name in Calico's `IPAMConfiguration` resource
    /// instead.
    pub fn address_persistence(&self) -> AddressPersistence {
        match self.kubevirt_persistence.get().map(String::as_str) {
            Some("Disabled") => AddressPersistence::Disabled,
            _ => AddressPersistence::Enabled,
        }
    }

    /// Returns the configured maximum number of blocks per host, or 0 if none is configured; see [`Self::block_limit`].
    pub fn max_blocks_per_host(&self) -> u32 {
        u32::try_from(self.max_blocks_per_host.or_zero().max(0)).unwrap_or(u32::MAX)
    }

    /// Checks that the settings do not contradict each other.
    ///
    /// # Errors
    /// [`ContradictorySettings`] for the first two settings that contradict each other.
    pub fn check(&self) -> Result<(), ContradictorySettings> {
        if !self.strict_affinity() && !self.auto_allocate_blocks() {
            return Err(ContradictorySettings::NeitherStrictNorAuto);
        }
        if !self.strict_affinity() && self.max_blocks_per_host() > 0 {
            return Err(ContradictorySettings::LimitWithoutStrict);
        }
        Ok(())
    }

    /// Sets whether a host takes addresses only from its own blocks.
    #[must_use]
    pub fn with_strict_affinity(mut self, strict: bool) -> Self {
        self.strict_affinity = Field::unless_zero(strict);
        self
    }

    /// Sets whether a host may claim new blocks automatically.
    #[must_use]
    pub fn with_auto_allocate_blocks(mut self, auto: bool) -> Self {
        self.auto_allocate_blocks = Field::unless_zero(auto);
        self
    }

    /// Sets the maximum number of blocks per host; 0 for the default.
    #[must_use]
    pub fn with_max_blocks_per_host(mut self, max: u32) -> Self {
        self.max_blocks_per_host = Field::unless_zero(max.into());
        self
    }

    /// Sets the cooldown of released addresses in seconds; 0 for no cooldown.
    #[must_use]
    pub fn with_cooldown_seconds(mut self, seconds: u32) -> Self {
        self.cooldown_seconds = Field::unless_zero(seconds.into());
        self
    }

    /// Sets whether a virtual machine keeps its addresses when its pod is recreated.
    #[must_use]
    pub fn with_address_persistence(mut self, persistence: AddressPersistence) -> Self {
        self.kubevirt_persistence = Field::Is(persistence.as_str().to_owned());
        self
    }
}

impl Document for IpamConfig {
    fn decode(key: &Key, value: &[u8]) -> Result<Self, Malformed> {
        from_json(key, value)
    }

    fn encode(&self) -> Result<Value, Malformed> {
        to_json(self)
    }
}

/// Maximum block limit and maximum cooldown in the schema of Calico's `IPAMConfiguration` resource. In Calico and in
/// Margay, the command `ipam configure` accepts a cooldown of up to 5,000 seconds.
const MAX_BLOCKS_SETTING: u32 = 1_000_000;
const MAX_COOLDOWN_SECONDS: u32 = 1_200;

spec_fields! {
    /// The field names in the spec of the IPAM settings.
    pub const SETTINGS_FIELDS:
    STRICT = "strictAffinity";
    AUTO = "autoAllocateBlocks";
    MAX_BLOCKS = "maxBlocksPerHost";
    PERSISTENCE = "kubeVirtVMAddressPersistence";
    COOLDOWN = "ipCooldownSeconds";
}

impl IpamConfig {
    /// Sets all settings from a spec. Settings that are missing in the spec get their default values.
    ///
    /// # Errors
    /// [`DocumentError::Invalid`] for a field with a wrong type or an out-of-range value, and for contradictory
    /// settings.
    pub fn with_spec(self, spec: &JsonObject) -> Result<Self, DocumentError> {
        let persistence = match PERSISTENCE.get(spec) {
            None => AddressPersistence::Enabled,
            Some(value) if value == "Enabled" => AddressPersistence::Enabled,
            Some(value) if value == "Disabled" => AddressPersistence::Disabled,
            Some(value) => return Err(wrong(PERSISTENCE, value, "must be Enabled or Disabled")),
        };
        let settings = self
            .with_strict_affinity(switch(spec, STRICT, false)?)
            .with_auto_allocate_blocks(switch(spec, AUTO, true)?)
            .with_max_blocks_per_host(number(spec, MAX_BLOCKS, MAX_BLOCKS_SETTING)?)
            .with_cooldown_seconds(number(spec, COOLDOWN, MAX_COOLDOWN_SECONDS)?)
            .with_address_persistence(persistence);
        settings.check().map_err(|error| DocumentError::Invalid(error.to_string()))?;
        Ok(settings)
    }

    /// Returns the spec of the IPAM settings, including fields with default values.
    pub fn spec(&self) -> Json {
        json!({
            STRICT.name: self.strict_affinity(),
            AUTO.name: self.auto_allocate_blocks(),
            MAX_BLOCKS.name: self.max_blocks_per_host(),
            PERSISTENCE.name: self.address_persistence().as_str(),
            COOLDOWN.name: self.cooldown_seconds().max(0),
        })
    }
}

fn switch(spec: &JsonObject, field: SpecField, default: bool) -> Result<bool, DocumentError> {
    match field.get(spec) {
        None => Ok(default),
        Some(value) => value.as_bool().ok_or_else(|| wrong(field, value, "must be true or false")),
    }
}

fn number(spec: &JsonObject, field: SpecField, max: u32) -> Result<u32, DocumentError> {
    let Some(value) = field.get(spec) else { return Ok(0) };
    let number = value.as_u64().and_then(|number| u32::try_from(number).ok()).filter(|number| *number <= max);
    number.ok_or_else(|| wrong(field, value, &format!("must be a number from 0 to {max}")))
}

fn wrong(field: SpecField, value: &Json, reason: &str) -> DocumentError {
    let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    DocumentError::field(format_args!("IPAMConfiguration.{}", field.name), value, reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(value: &str) -> IpamConfig {
        IpamConfig::decode(&Key::default(), value.as_bytes()).unwrap()
    }

    #[test]
    fn config_empty_and_none_differ() {
        assert!(!decode("{}").auto_allocate_blocks());
        assert!(IpamConfig::default().auto_allocate_blocks());
        assert_eq!(
            IpamConfig::default().encode().unwrap().as_bytes(),
            br#"{"auto_allocate_blocks":true,"kubeVirtVMAddressPersistence":"Enabled"}"#
        );
    }

    #[test]
    fn config_limit_is_smaller_of_those_set() {
        for (stored, requested, limit) in [
            ("{}", 0, 20),
            ("{}", 1, 1),
            ("{}", 50, 50),
            (r#"{"maxBlocksPerHost":5}"#, 0, 5),
            (r#"{"maxBlocksPerHost":5}"#, 2, 2),
            (r#"{"maxBlocksPerHost":5}"#, 9, 5),
            (r#"{"maxBlocksPerHost":-1}"#, 0, 20),
            (r#"{"maxBlocksPerHost":null}"#, 0, 20),
        ] {
            assert_eq!(decode(stored).block_limit(requested), limit, "{stored} {requested}");
        }
    }

    #[test]
    fn config_contradictions_are_calico_errors() {
        let said = |config: IpamConfig| config.check().map_err(|error| error.to_string());
        let default = IpamConfig::default;
        assert_eq!(said(default()), Ok(()));
        assert_eq!(
            said(default().with_auto_allocate_blocks(false)).unwrap_err(),
            "Cannot disable 'StrictAffinity' and 'AutoAllocateBlocks' at the same time"
        );
        assert_eq!(
            said(default().with_max_blocks_per_host(1)).unwrap_err(),
            "MaxBlocksPerHost requires StrictAffinity to be enabled"
        );
        assert_eq!(said(default().with_strict_affinity(true).with_max_blocks_per_host(1)), Ok(()));
        assert_eq!(said(default().with_strict_affinity(true).with_auto_allocate_blocks(false)), Ok(()));
    }

    #[test]
    fn config_persistence_is_on_unless_off() {
        assert_eq!(decode("{}").address_persistence(), AddressPersistence::Enabled);
        let off = IpamConfig::default().with_address_persistence(AddressPersistence::Disabled);
        assert_eq!(off.address_persistence(), AddressPersistence::Disabled);
        assert_eq!(off.with_address_persistence(AddressPersistence::Enabled), IpamConfig::default());
    }

    #[test]
    fn config_zeros_are_left_out() {
        let config = decode(r#"{"strict_affinity":true,"maxBlocksPerHost":2,"ipCooldownSeconds":60,"later":1}"#)
            .with_strict_affinity(false)
            .with_auto_allocate_blocks(true)
            .with_max_blocks_per_host(0)
            .with_cooldown_seconds(0);
        assert_eq!(config.encode().unwrap().as_bytes(), br#"{"auto_allocate_blocks":true,"later":1}"#);
    }
}
