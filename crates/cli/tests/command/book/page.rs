//! Parses a page of the book: the headings, the sessions, and the files that the page tells the reader to save.

use std::fs;
use std::path::PathBuf;

use crate::book::engine;

/// The prompts that begin a command line in a session of the book. A line that begins with a prompt counts as output
/// unless one of the programs in `OURS` follows the prompt.
const PROMPTS: [&str; 2] = ["# ", "$ "];
const OURS: [&str; 3] = ["margay", "cat", "echo"];
/// Pages on which the test also runs the program `ip`, because `ip` shows the state of the page's machine.
const WITH_IP: [&str; 1] = ["routed-network.md"];
const OTHERS: [&str; 10] = ["make", "curl", "podman", "ctr", "crictl", "ip", "kubectl", "systemctl", "nerdctl", "for"];

#[derive(Debug)]
pub(crate) struct Page {
    pub(crate) name: String,
    file: PathBuf,
    text: String,
    pub(crate) parts: Vec<Part>,
}

/// A part of a book page that the test needs.
#[derive(Debug)]
pub(crate) enum Part {
    Heading(String),
    /// The name of an event that the test must cause at this point of the page; the name is in an HTML comment, which
    /// readers do not see.
    Scene(String),
    /// A file that the page tells the reader to save.
    File {
        path: String,
        text: String,
    },
    Session {
        line: usize,
        steps: Vec<Step>,
    },
}

/// A command of a session and the output that the page shows for the command.
#[derive(Debug)]
pub(crate) struct Step {
    /// The whole line of the command in the page, including the prompt.
    prompt: String,
    pub(crate) command: String,
    pub(crate) expected: String,
    is_run: bool,
}

impl Step {
    /// Returns the name of the program that the command runs.
    pub(crate) fn program(&self) -> &str {
        self.command.split(' ').next().unwrap_or_default()
    }

    /// Returns the file that a `cat` command shows; a page uses `cat` to tell the reader the content of a file.
    pub(crate) fn shown_file(&self) -> Option<&str> {
        self.command.strip_prefix("cat ")
    }

    /// Returns whether the command belongs to a program that the test does not run.
    pub(crate) fn is_others(&self) -> bool {
        !self.is_run
    }
}

/// Returns the command in a line, if the line contains a command.
fn command(line: &str) -> Option<&str> {
    let rest = PROMPTS.iter().find_map(|prompt| line.strip_prefix(prompt))?;
    let program = rest.split(' ').next()?;
    (OURS.contains(&program) || OTHERS.contains(&program)).then_some(rest)
}

impl Page {
    /// Reads a page and replaces its store engine by the engine under test.
    pub(crate) fn read(file: PathBuf) -> Self {
        let text = engine::text(&fs::read_to_string(&file).unwrap());
        let name = file.file_name().unwrap().to_str().unwrap().to_owned();
        let mut parts = Vec::new();
        let mut lines = text.lines().enumerate();
        let mut saved_as = None;
        while let Some((at, line)) = lines.next() {
            if let Some(language) = line.strip_prefix("```") {
                let block: Vec<&str> = lines.by_ref().map(|(_, line)| line).take_while(|line| *line != "```").collect();
                match (language, saved_as.take()) {
                    ("console", _) => parts.push(Part::Session { line: at + 1, steps: steps(&name, &block) }),
                    (_, Some(path)) => parts.push(Part::File { path, text: block.join("\n") }),
                    _ => {}
                }
            } else if let Some(heading) = line.strip_prefix("## ").or_else(|| line.strip_prefix("### ")) {
                parts.push(Part::Heading(heading.to_owned()));
            } else if let Some(scene) = line.strip_prefix("<!-- scene: ") {
                parts.push(Part::Scene(scene.trim_end_matches(" -->").to_owned()));
            } else if let Some((_, rest)) = line.split_once("Save this as `") {
                saved_as = rest.split('`').next().map(str::to_owned);
            }
        }
        Self { name, file, text, parts }
    }

    pub(crate) fn steps(&self) -> impl Iterator<Item = &Step> {
        self.parts.iter().flat_map(|part| match part {
            Part::Session { steps, .. } => steps.as_slice(),
            _ => &[],
        })
    }

    /// Writes the page back with the current output of its sessions.
    pub(crate) fn write(&self) {
        let mut sessions = self.parts.iter().filter_map(|part| match part {
            Part::Session { steps, .. } => Some(steps),
            _ => None,
        });
        let (mut written, mut within) = (String::new(), false);
        for line in self.text.lines() {
            if within && line != "```" {
                continue;
            }
            within = line == "```console";
            written += &format!("{line}\n");
            if within {
                for step in sessions.next().unwrap() {
                    written += &format!("{}\n", step.prompt);
                    let lines = step.expected.trim_end().lines();
                    lines.for_each(|line| written += &format!("{}\n", line.trim_end()));
                }
            }
        }
        fs::write(&self.file, written).unwrap();
    }
}

fn steps(page: &str, block: &[&str]) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    for line in block {
        match (command(line), steps.last_mut()) {
            (Some(command), _) => {
                let program = command.split(' ').next().unwrap_or_default();
                let is_run = OURS.contains(&program) || program == "ip" && WITH_IP.contains(&page);
                let (prompt, command) = ((*line).to_owned(), command.to_owned());
                steps.push(Step { prompt, command, expected: String::new(), is_run });
            }
            (None, Some(step)) => step.expected += &format!("{line}\n"),
            (None, None) => panic!("output without a command: {line}"),
        }
    }
    steps
}
