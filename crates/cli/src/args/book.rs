//! The book's commands.

use clap::Parser;

use super::Cli;

/// Each command of the book, on every page, is one that can be typed.
#[test]
fn the_books_commands_can_be_typed() {
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs");
    let pages = std::fs::read_dir(docs).unwrap().map(|page| page.unwrap().path());
    let pages = pages.filter(|page| page.extension().is_some_and(|kind| kind == "md"));
    let mut found = 0;
    for page in pages {
        for line in std::fs::read_to_string(&page).unwrap().lines() {
            let typed = ["# margay ", "$ margay "].iter().find_map(|prompt| line.strip_prefix(prompt));
            let Some(typed) = typed.filter(|typed| !typed.contains("...")) else { continue };
            let words = words(typed.split(" #").next().unwrap_or(typed));
            let parsed = Cli::try_parse_from(std::iter::once("margay".to_owned()).chain(words));
            let is_right = match &parsed {
                Ok(_) => true,
                // A command that the book shows as refused is refused for its meaning, not for its spelling.
                Err(error) => matches!(
                    error.kind(),
                    clap::error::ErrorKind::DisplayHelp
                        | clap::error::ErrorKind::DisplayVersion
                        | clap::error::ErrorKind::ValueValidation
                ),
            };
            assert!(is_right, "{}: {line}: {}", page.display(), parsed.unwrap_err());
            found += 1;
        }
    }
    assert!(found > 60, "only {found} commands were found");
}

/// So is what the systemd units call.
#[test]
fn what_units_call_can_be_typed() {
    let units = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/systemd");
    let mut calls = Vec::new();
    for folder in [units, concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/systemd/user")] {
        for unit in std::fs::read_dir(folder).unwrap() {
            let path = unit.unwrap().path();
            let text = if path.is_file() { std::fs::read_to_string(path).unwrap() } else { String::new() };
            calls.extend(text.lines().filter_map(|line| line.strip_prefix("ExecStart=")).map(words));
        }
    }
    assert_eq!(calls.len(), 4, "{calls:?}");
    for mut call in calls {
        // An administrator's further options, of which there are none at first.
        call.retain(|word| word != "$MARGAY_SERVE");
        Cli::try_parse_from(&call).unwrap_or_else(|error| panic!("{call:?}: {error}"));
    }
}

/// The words of a line up to a pipe or a redirection, as a shell takes them apart.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for sign in line.chars() {
        match (sign, quote) {
            (sign, Some(open)) if sign == open => quote = None,
            (sign, Some(_)) => word.get_or_insert_default().push(sign),
            ('\'' | '"', None) => {
                quote = Some(sign);
                word.get_or_insert_default();
            }
            ('|' | '>' | '<' | ';' | '&', None) => break,
            (' ', None) => words.extend(word.take()),
            (sign, None) => word.get_or_insert_default().push(sign),
        }
    }
    words.extend(word);
    words
}
