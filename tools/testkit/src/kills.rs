//! Adds and deletes containers repeatedly while plugin processes are killed, on any kind of store.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Mutex;
use std::thread::{self, sleep};
use std::time::Duration;

use serde_json::Value;

use crate::process::{Call, Outcome};
use crate::random::Random;

const CALLERS: u64 = 6;
const ROUNDS: u64 = 25;
/// Maximum time in milliseconds between the start of a plugin call and its kill. A plugin call takes a few milliseconds
/// when run alone, and tens of milliseconds when run concurrently with other calls.
const KILL_WITHIN: u64 = 30;
/// Maximum time in milliseconds between the ADD and the DEL of a container.
const LIFE: u64 = 20;

/// Adds and deletes containers, and kills a third of the ADDs; each container gets a DEL at the end of its life. An ADD
/// may fail because no address is free. The closure `has` reads a value from the result of an ADD, for example the
/// address. For two containers that exist at the same time, `has` must never return the same value.
pub fn values_stay_unique<T: Ord + Debug + Send>(conf: &Value, has: impl Fn(&Outcome) -> T + Sync) {
    let living: Mutex<BTreeMap<T, String>> = Mutex::default();
    thread::scope(|scope| {
        for caller in 0..CALLERS {
            let (living, has) = (&living, &has);
            scope.spawn(move || {
                let mut random = Random::new(29, caller);
                let mut answered = 0;
                for round in 0..ROUNDS {
                    let container = format!("k{caller}-{round}");
                    let add = Call::new("ADD", &container, conf);
                    if random.once_in(3) {
                        let mut child = add.start(add.command());
                        sleep(Duration::from_millis(random.below(KILL_WITHIN)));
                        let _ = child.kill();
                        child.wait().unwrap();
                    } else if let outcome = add.run()
                        && outcome.exit == 0
                    {
                        answered += 1;
                        let before = living.lock().unwrap().insert(has(&outcome), container.clone());
                        assert_eq!(before, None, "{outcome:?}");
                        sleep(Duration::from_millis(random.below(LIFE)));
                        living.lock().unwrap().remove(&has(&outcome));
                    }
                    Call::new("DEL", &container, conf).ok();
                }
                assert!(answered > 0, "caller {caller} had no answer");
            });
        }
    });
}
