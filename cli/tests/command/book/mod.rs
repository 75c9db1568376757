//! The sessions of the book are run, each page from top to bottom on a machine of its own (see [`machine`]), and what comes
//! out is compared with what the page says. Where a page begins from something, its scene prepares that.
//!
//! `MARGAY_BOOK=write` writes what has come out into the pages instead.

mod machine;
mod page;
mod rules;
mod scenes;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::{env, fs, thread};

use machine::Machine;
use page::{Page, Part, Step};

/// Pages that are not run, and why.
const NOT_RUN: &[(&str, &str)] = &[
    ("beside-calico.md", "it changes the plugins of a node; cli/tests/command/install does that"),
    ("bridged-networks.md", "its commands look at containers"),
    ("coming-from-host-local.md", "its pool comes from a network's configuration, when its first container starts"),
    ("judge-a-store.md", "it takes seconds, and tells of them; cli/tests/command/conformance.rs runs it"),
    ("network-configuration.md", "its commands look at containers"),
    ("runtime-containerd.md", "it starts containers"),
    ("runtime-podman.md", "it starts containers"),
    ("torture.md", "it works for minutes"),
];

/// Sections that are not run, and why.
const SECTIONS_NOT_RUN: &[(&str, &str, &str)] = &[
    ("command-line.md", "gc", "its second look comes a minute later; cli/tests/command/gc.rs and gone run it"),
    ("when-addresses-run-out.md", "Has something leaked?", "it waits for a minute"),
];

fn docs() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs")
}

/// The pages with sessions.
fn pages() -> Vec<Page> {
    let files = fs::read_dir(docs()).unwrap().map(|file| file.unwrap().path());
    let mut pages: Vec<Page> =
        files.filter(|file| file.extension().is_some_and(|kind| kind == "md")).map(Page::read).collect();
    pages.retain(Page::has_sessions);
    pages.sort_by(|a, b| a.name.cmp(&b.name));
    pages
}

#[test]
fn the_sessions_of_the_book_are_what_they_say() {
    let mut differences = Vec::new();
    let mut run = 0;
    for mut page in pages().into_iter().filter(|page| !NOT_RUN.iter().any(|(name, _)| *name == page.name)) {
        // A machine is a matter of the thread.
        let (page, found, count) = thread::spawn(move || {
            let (found, count) = play(&mut page);
            (page, found, count)
        })
        .join()
        .unwrap();
        if env::var("MARGAY_BOOK").is_ok_and(|wish| wish == "write") {
            page.write();
        }
        differences.extend(found);
        run += count;
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
    assert!(run > 60, "only {run} commands were run");
}

/// Runs a page; returns what differs, and how many commands were run.
fn play(page: &mut Page) -> (Vec<String>, usize) {
    let mut machine = Machine::new();
    let (mut differences, mut count) = (Vec::new(), 0);
    let name = page.name.clone();
    let (mut section, mut is_run) = (String::new(), true);
    scenes::set(&name, "", &mut machine);
    for part in &mut page.parts {
        match part {
            Part::Heading(heading) => {
                section.clone_from(heading);
                is_run = !SECTIONS_NOT_RUN.iter().any(|(page, not, _)| *page == name && not == heading);
                scenes::set(&name, heading, &mut machine);
            }
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
                    let output = rules::without_store_line(&output, &step.expected);
                    let differs = match shows_commands_alone {
                        true => code != 0,
                        false => !rules::agree(&step.expected, &output),
                    };
                    if differs {
                        differences.push(difference(&name, *line, step, &output));
                        // What a page leaves out is for a person to say.
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
fn pages_that_are_not_run_have_sessions() {
    let names: BTreeSet<String> = pages().into_iter().map(|page| page.name).collect();
    for (name, why) in NOT_RUN {
        assert!(names.contains(*name), "{name} ({why}) has no session any more");
    }
}

#[test]
fn other_programs_are_few_and_known() {
    let others: BTreeSet<String> = pages()
        .iter()
        .filter(|page| !NOT_RUN.iter().any(|(name, _)| *name == page.name))
        .flat_map(|page| {
            page.steps().filter(|step| step.is_others()).map(|step| step.program().to_owned()).collect::<Vec<_>>()
        })
        .collect();
    // They belong to a checkout of the sources.
    assert_eq!(others.iter().collect::<Vec<_>>(), ["make"], "these are not run");
}
