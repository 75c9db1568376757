//! Tests `--dry-run`: for every command that changes a store, a dry run makes the checks of a real run, and writes
//! nothing.

use serde_json::Value;

use crate::common::Done;
use crate::conditions::commands::{COMMANDS, Command, Kind};
use crate::conditions::ground::{Ground, content, copy, run};

/// Commands that write nothing without an option such as `--apply`.
const DRY_BY_THEMSELVES: [&str; 2] = ["gc", "ipam check"];

fn runs(ground: &Ground, command: &Command, more: &[&str]) -> Done {
    let mut args = ground.args(command, &ground.place_for(command), 0);
    args.extend(more.iter().map(|&word| word.to_owned()));
    run(&args)
}

/// Returns a command's exit code and error line, which must not depend on `--dry-run`.
fn complaint(done: &Done) -> (u8, &str) {
    (done.code, done.err.lines().find(|line| line.starts_with("error: ")).unwrap_or_default())
}

#[test]
fn dry_run_says_what_would_be_done_and_does_nothing() {
    for ground in Ground::each() {
        let kept = ground.path("kept");
        copy(ground.folder(), &kept);
        for command in COMMANDS.iter().filter(|one| one.kind != Kind::Reads || one.name == "migrate") {
            let words = command.words();
            let place = ground.place_for(command);
            let path = place.path().unwrap();
            let before = path.exists().then(|| content(&place));
            let tried = runs(&ground, command, &["--dry-run"]);
            assert_eq!(tried.code, 0, "{words}: {}", tried.err);
            let says = tried.out.starts_with("Dry run: ") || tried.out.starts_with("Would ");
            assert!(says || words.starts_with("store upgrade"), "{words}: {}", tried.out);
            let json: Value = serde_json::from_str(&runs(&ground, command, &["--dry-run", "-o", "json"]).out).unwrap();
            assert!(json["dry_run"] == true || json.get("would_delete").is_some(), "{words}: {json}");
            assert_eq!(path.exists().then(|| content(&place)), before, "{words} has written");

            // The first real run (without `--dry-run`) must succeed. A dry run after the first real run must have the
            // exit code and error line that a second real run has.
            let done = runs(&ground, command, &[]);
            assert_eq!(done.code, 0, "{words}: {}", done.err);
            let tried = runs(&ground, command, &["--dry-run"]);
            let again = runs(&ground, command, &[]);
            assert_eq!(complaint(&tried), complaint(&again), "{words}");
            copy(&kept, ground.folder());
            let _ = std::fs::remove_dir_all(ground.path("empty"));
            let _ = std::fs::remove_dir_all(ground.path("other0"));
        }
        assert!(COMMANDS.iter().any(|one| DRY_BY_THEMSELVES.contains(&one.name)));
    }
}

#[test]
fn dry_run_makes_no_store() {
    for ground in Ground::each() {
        for command in COMMANDS.iter().filter(|one| matches!(one.kind, Kind::Makes | Kind::Fills)) {
            let store = ground.beside("nowhere/store");
            let mut args = ground.args(command, &store, 0);
            args.push("--dry-run".to_owned());
            let tried = run(&args);
            assert_eq!(tried.code, 0, "{}: {}", command.words(), tried.err);
            assert!(!ground.path("nowhere").exists(), "{}", command.words());
        }
    }
}

#[test]
fn dry_run_says_when_no_store_can_be_made() {
    for ground in Ground::each() {
        std::fs::write(ground.path("file"), "").unwrap();
        std::fs::create_dir(ground.path("photos")).unwrap();
        std::fs::write(ground.path("photos/cat.jpeg"), "").unwrap();
        for (place, word) in [("file/a/store", "/file is in the way"), ("photos", "cat.jpeg")] {
            for command in COMMANDS.iter().filter(|one| matches!(one.kind, Kind::Makes | Kind::Fills)) {
                let mut args = ground.args(command, &ground.beside(place), 0);
                let done = run(&args);
                args.push("--dry-run".to_owned());
                let tried = run(&args);
                for refused in [done, tried] {
                    assert!(refused.code == 1 && refused.err.contains(word), "{}: {}", command.words(), refused.err);
                }
            }
        }
    }
}

#[test]
fn dry_run_tries_documents_of_one_file_together() {
    for ground in Ground::each() {
        let pool = |name: &str, cidr: &str| {
            format!(
                "---\napiVersion: projectcalico.org/v3\nkind: IPPool\nmetadata: {{name: {name}}}\nspec: {{cidr: {cidr}}}\n"
            )
        };
        let file = ground.path("both.yaml");
        std::fs::write(&file, pool("a", "10.80.0.0/16") + &pool("b", "10.80.1.0/24") + &pool("a", "10.81.0.0/16"))
            .unwrap();
        let create = |more: &str| ground.lab.margay(&format!("create -f {}{more}", file.display()));
        let (tried, done) = (create(" --dry-run"), create(""));
        assert_eq!((tried.code, &tried.err), (done.code, &done.err));
        assert!(
            tried.err.contains("overlaps with IPPool(a)") && tried.err.contains("already exists: IPPool(a)"),
            "{}",
            tried.err
        );
        assert_eq!(tried.out, "Dry run: would have created 1 out of 3 'IPPool' resources:\n");
    }
}
