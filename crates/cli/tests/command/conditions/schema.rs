//! Tests that the JSON output of every command has the fields that the book documents.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::conditions::commands::{COMMANDS, Command, Kind};
use crate::conditions::ground::{Ground, copy, run};

/// Returns the rows of the two tables under the heading "JSON" in the book, each as the texts of its first and second
/// cell.
fn rows() -> Vec<(String, String)> {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/command-line.md");
    let page = std::fs::read_to_string(page).unwrap();
    let section = page.split("\n## JSON\n").nth(1).unwrap();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |")?.split_once(" | "));
    rows.map(|(who, what)| (who.to_owned(), what.to_owned())).collect()
}

/// Returns the field names of the first object in a text such as `{"a": {"b"}, "c"}`.
fn members(text: &str) -> BTreeSet<String> {
    let (mut depth, mut found, mut is_value, mut word) = (0, BTreeSet::new(), false, None::<String>);
    for sign in text.chars() {
        match (sign, &mut word) {
            ('"', None) => word = Some(String::new()),
            ('"', Some(_)) => {
                let name = word.take().unwrap();
                if depth == 1 && !is_value {
                    found.insert(name);
                }
            }
            (sign, Some(word)) => word.push(sign),
            ('{' | '[', None) => depth += 1,
            ('}' | ']', None) => {
                depth -= 1;
                if depth == 0 {
                    break;
                }
            }
            (':', None) if depth == 1 => is_value = true,
            (',', None) if depth == 1 => is_value = false,
            _ => {}
        }
    }
    found
}

/// Returns the fields that the book documents for a row of the JSON tables.
fn documented(rows: &[(String, String)], row: &str) -> BTreeSet<String> {
    let (_, what) = rows.iter().find(|(who, _)| who.split(", ").any(|who| who.trim_matches('`') == row)).unwrap();
    let mut found = if what.contains('{') { members(what) } else { BTreeSet::new() };
    for (object, its) in rows {
        let article = ["a", "an"]
            .iter()
            .any(|a| *what == format!("{a} {object}") || what.contains(&format!("}}` and {a} {object}")));
        if article {
            let its = its.split(". On etcd").next().unwrap();
            let names = its
                .split('`')
                .skip(1)
                .step_by(2)
                .filter(|name| name.chars().all(|c| c.is_ascii_lowercase() || c == '_'));
            found.extend(names.map(str::to_owned));
        }
    }
    found
}

/// Fields that are optional according to the book, or that the book describes only in words.
const SOMETIMES: &[&str] = &[
    "gateway",
    "namespace_selector",
    "prefix",
    "prefix_length",
    "quarantined",
    "cooling_down_since",
    "handle",
    "attributes",
    "alternate_attributes",
    "revisions",
    "age_seconds",
    "largest",
    "min_age_seconds",
    "max_",
    "dry_run",
    "addresses",
];

/// Returns the name of the row in the book's table that documents a command's JSON output. In the book's table of JSON
/// outputs, some rows name an option or argument in addition to the command.
fn row(command: &Command) -> String {
    let words = command.words();
    let option = words
        .split(' ')
        .find(|word| ["--ip", "--show-borrowed", "--show-configuration", "--forecast", "--from-report"].contains(word));
    match (command.name, option) {
        ("ipam show", Some(option)) => format!("ipam show {option}"),
        ("ipam release", Some("--from-report")) => "ipam release --from-report".to_owned(),
        ("get", _) if words.ends_with("main") => "get KIND NAME".to_owned(),
        ("get", _) => "get KIND".to_owned(),
        (name, _) => name.to_owned(),
    }
}

#[test]
fn answer_members_match_book() {
    let rows = rows();
    let [ground, _] = Ground::each();
    copy(ground.folder(), &ground.path("kept"));
    // The test skips `metrics` (which prints a list), `get` (Calico's document) and `watch` (lines of events), because
    // their JSON output has no documented fields.
    for command in
        COMMANDS.iter().filter(|one| !["metrics", "watch"].contains(&one.name) && one.words() != "get ippool main")
    {
        if command.kind != Kind::Reads {
            copy(&ground.path("kept"), ground.folder());
            let _ = std::fs::remove_dir_all(ground.path("empty"));
        }
        let mut args = ground.args(command, &ground.place_for(command), 0);
        args.extend(["-o".to_owned(), "json".to_owned()]);
        let done = run(&args);
        assert_eq!(done.code, 0, "{}: {}", command.words(), done.err);
        let json: Value = serde_json::from_str(&done.out).unwrap();
        let has: BTreeSet<String> = json.as_object().unwrap().keys().cloned().collect();
        let mut named = documented(&rows, &row(command));
        // The book's table has one row for `create`, `apply`, `replace` and `delete`; the row names the JSON field of
        // `create`.
        let verb = match command.name {
            "apply" => Some("applied"),
            "replace" => Some("replaced"),
            "delete" => Some("deleted"),
            _ => None,
        };
        if let Some(verb) = verb {
            named.remove("created");
            named.insert(verb.to_owned());
        }
        let odd: Vec<_> = has.symmetric_difference(&named).filter(|name| !SOMETIMES.contains(&name.as_str())).collect();
        assert!(odd.is_empty(), "{}: {odd:?}; it has {has:?}, and the book names {named:?}", command.words());
    }
}
