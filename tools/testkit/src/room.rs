//! Frees space in an etcd whose space quota was used up.

use std::time::Duration;

use etcd_client::{AlarmAction, AlarmOptions, AlarmType, Client, Error};

/// Defragments the database of an etcd member until it is smaller than `roomy` bytes, and disarms the NOSPACE alarms.
pub async fn make_room(client: &mut Client, roomy: i64) -> Result<(), Error> {
    // etcd deletes old revisions some time after it has answered a compaction, and until then defragmenting frees no
    // space.
    loop {
        client.defragment().await?;
        if client.status().await?.db_size() < roomy {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for alarm in client.alarm(AlarmAction::Get, AlarmType::None, None).await?.alarms() {
        let mut options = AlarmOptions::new();
        options.with_member(alarm.member_id());
        client.alarm(AlarmAction::Deactivate, AlarmType::Nospace, Some(options)).await?;
    }
    Ok(())
}
