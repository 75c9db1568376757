//! Runs the sessions of the book and compares the output with the pages. Each page runs from top to bottom on its own
//! machine (see [`machine`]). If a page of the book needs an initial state of the machine, a function in [`scenes`]
//! prepares it.
//!
//! With `MARGAY_BOOK=write`, the test writes the output into the pages instead of comparing it.

mod engine;
pub(crate) mod machine;
mod nodes;
mod page;
mod rules;
mod scenes;

use std::collections::BTreeSet;
use std::{env, fs, thread};

use machine::Machine;
use page::{Page, Part, Step};

use crate::tested::{NOT_RUN, docs, instead};

/// Sections of the book that the test does not run, each with the reason.
const SECTIONS_NOT_RUN: &[(&str, &str, &str)] = &[
    ("command-line.md", "gc", "its second look comes a minute later; crates/cli/tests/command/gc.rs and gone run it"),
    (
        "judge-a-store.md",
        "What failed",
        "which revision it is is another each time; crates/cli/tests/command/conformance.rs runs it",
    ),
    ("when-addresses-run-out.md", "Has something leaked?", "it waits for a minute"),
];

/// Returns the pages of the book that contain sessions.
fn pages() -> Vec<Page> {
    let files = fs::read_dir(docs()).unwrap().map(|file| file.unwrap().path());
    let mut pages: Vec<Page> =
        files.filter(|file| file.extension().is_some_and(|kind| kind == "md")).map(Page::read).collect();
    pages.retain(|page| page.steps().any(|step| !step.is_others()));
    pages.sort_by(|a, b| a.name.cmp(&b.name));
    pages
}

#[test]
fn book_sessions_match_their_output() {
    let mut differences = Vec::new();
    let mut run = 0;
    for mut page in pages() {
        // Kernel namespaces belong to a thread, so each page gets its own thread.
        let (page, found, count) = thread::spawn(move || {
            let (found, count) = play(&mut page);
            (page, found, count)
        })
        .join()
        .unwrap();
        if instead().is_none() && env::var("MARGAY_BOOK").is_ok_and(|wish| wish == "write") {
            page.write();
        }
        differences.extend(found);
        run += count;
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
    assert!(run > 60, "only {run} commands were run");
}

fn is_left_out(page: &str, section: &str) -> bool {
    let lists = [SECTIONS_NOT_RUN, NOT_RUN];
    lists.into_iter().flatten().any(|(of, not, _)| *of == page && (*not == section || *not == "*"))
}

/// Runs a page, and returns the differences between the page and the real output, and the number of commands that were
/// run.
fn play(page: &mut Page) -> (Vec<String>, usize) {
    let mut machine = Machine::new();
    let (mut differences, mut count) = (Vec::new(), 0);
    let name = page.name.clone();
    let (mut section, mut is_run) = (String::new(), !is_left_out(&name, ""));
    if is_run {
        scenes::set(&name, "", &mut machine);
    }
    for part in &mut page.parts {
        match part {
            Part::Heading(heading) => {
                section.clone_from(heading);
                is_run = !is_left_out(&name, heading);
                if is_run {
                    scenes::set(&name, heading, &mut machine);
                }
            }
            Part::Scene(_) if !is_run => {}
            Part::Scene(scene) => scenes::happen(scene, &mut machine),
            Part::File { path, text } => machine.put(path, text),
            Part::Session { steps, .. } if !is_run => assert!(!steps.is_empty(), "{name}, {section}"),
            Part::Session { line, steps } => {
                let shows_commands_alone = steps.iter().all(|step| step.expected.is_empty());
                for step in steps.iter_mut().filter(|step| !step.is_others()) {
                    if let Some(file) = step.shown_file() {
                        machine.put(file, &step.expected);
                        continue;
                    }
                    let (code, output) = machine.run(&step.command);
                    count += 1;
                    let expected = engine::expected(&step.expected);
                    let output = rules::without_store_line(&output, expected);
                    let differs = match shows_commands_alone {
                        true => code != 0,
                        false => !rules::agree(expected, &output),
                    };
                    if differs {
                        differences.push(difference(&name, *line, step, &output));
                        // Only a person can update output in which the page omits lines with `...`.
                        if !shows_commands_alone && !step.expected.contains("...\n") {
                            step.expected = output;
                        }
                    }
                }
            }
        }
    }
    (differences, count)
}

fn difference(page: &str, line: usize, step: &Step, output: &str) -> String {
    format!("docs/{page}:{line}: {}\n--- the page says\n{}--- it is\n{output}", step.command, step.expected)
}

#[test]
fn book_calls_few_other_programs() {
    let others: BTreeSet<String> = pages()
        .iter()
        .flat_map(|page| {
            page.steps().filter(|step| step.is_others()).map(|step| step.program().to_owned()).collect::<Vec<_>>()
        })
        .collect();
    // The test runs neither `curl`, `make` nor `podman`: the plugin's own tests cover containers, and `make` needs a
    // checkout of the sources.
    assert_eq!(others.iter().collect::<Vec<_>>(), ["curl", "make", "podman"], "these are not run");
}
