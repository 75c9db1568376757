//! Tests that settings are read, changed concurrently, and refused if they contradict each other.

use std::sync::Arc;

use ipam_core::Error;
use ipam_core::model::{AddressPersistence, IpamConfig, keys};
use kv::StoreExt;

use crate::world::{World, soon};

#[tokio::test]
async fn settings_are_read_without_storing_defaults() {
    let world = World::new().await;
    let before = world.dump().await;
    assert_eq!(world.ipam.config(soon()).await.unwrap(), IpamConfig::default());
    let same = world.ipam.change_config(|config| config.with_strict_affinity(false), soon()).await.unwrap();
    assert_eq!(same, IpamConfig::default());
    assert_eq!(world.dump().await, before);
}

#[tokio::test]
async fn settings_change_keeps_what_it_does_not_name() {
    let world = World::new().await;
    let stored = r#"{"strict_affinity":true,"auto_allocate_blocks":true,"maxBlocksPerHost":3,"later":{"x":1}}"#;
    world.store.put(keys::config(), stored).await.unwrap();
    world.ipam.change_config(|config| config.with_cooldown_seconds(60), soon()).await.unwrap();
    assert_eq!(
        world.value(&keys::config()).await.as_bytes(),
        br#"{"strict_affinity":true,"auto_allocate_blocks":true,"maxBlocksPerHost":3,"ipCooldownSeconds":60,"later":{"x":1}}"#
    );
}

#[tokio::test]
async fn settings_are_refused_only_when_change_contradicts() {
    let world = World::new().await;
    let refuse = async |change: fn(IpamConfig) -> IpamConfig| match world
        .ipam
        .change_config(change, soon())
        .await
        .unwrap_err()
    {
        Error::Settings(error) => error.to_string(),
        error => panic!("{error}"),
    };
    assert!(refuse(|config| config.with_auto_allocate_blocks(false)).await.starts_with("Cannot disable"));
    assert!(refuse(|config| config.with_max_blocks_per_host(2)).await.starts_with("MaxBlocksPerHost requires"));
    assert!(world.store.get(keys::config()).await.unwrap().is_none());
    // Settings that Calico stored apply even if the settings contradict each other. Writing back unchanged settings is
    // not a change, so even contradictory settings are not refused.
    world.store.put(keys::config(), "{}").await.unwrap();
    assert!(!world.ipam.change_config(|config| config, soon()).await.unwrap().auto_allocate_blocks());
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_changes_at_once_do_not_undo_each_other() {
    let world = Arc::new(World::new().await);
    let strict: fn(IpamConfig) -> IpamConfig = |config| config.with_strict_affinity(true);
    let changes: [fn(IpamConfig) -> IpamConfig; 3] = [
        strict,
        |config| config.with_cooldown_seconds(7),
        |config| config.with_address_persistence(AddressPersistence::Disabled),
    ];
    let tasks = changes.map(|change| {
        let world = Arc::clone(&world);
        tokio::spawn(async move { world.ipam.change_config(change, soon()).await.unwrap() })
    });
    for task in tasks {
        task.await.unwrap();
    }
    let config = world.ipam.config(soon()).await.unwrap();
    assert!(config.strict_affinity() && config.auto_allocate_blocks());
    assert_eq!((config.cooldown_seconds(), config.address_persistence()), (7, AddressPersistence::Disabled));
}
