//! Tests of plugin calls that cannot write their result to standard output.

use std::fs::OpenOptions;
use std::process::Stdio;

use crate::lab::{ENGINES, Lab};

/// Tests that a plugin call fails if its result cannot be written. The failed call's commit remains in the store; the
/// runtime then sends DEL, which releases the addresses.
#[test]
fn unread_result_stays_committed_until_del() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.4.0.0/24");
        let full = || Stdio::from(OpenOptions::new().write(true).open("/dev/full").unwrap());
        let unread = || Stdio::from(std::io::pipe().unwrap().1);
        let outputs: [(&str, &dyn Fn() -> Stdio); 2] = [("full", &full), ("unread", &unread)];
        for (container, output) in outputs {
            let add = lab.add(container);
            let mut command = add.command();
            command.stdout(output());
            let outcome = add.run_as(command);
            assert_eq!(outcome.exit, 1, "{engine:?} {container}: {outcome:?}");
            let handle = format!("net1.{container}");
            let books = lab.books();
            assert_eq!(books.count_of(&handle), 1, "{engine:?} {container}");
            // A runtime that repeats the failed ADD gets the same address.
            assert_eq!(books.held[&add.ok().address()], handle);
            lab.del(container).ok();
            lab.nothing_is_left();
        }
    }
}
