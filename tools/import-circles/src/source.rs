//! Reads the source files of a crate, and finds which items of other files each file names.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use proc_macro2::TokenStream;
use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemMod, ItemUse, Macro, UseTree, Visibility};

/// A path of Rust names: the path of a module from the crate's root, or the path of an item as it is written in a
/// source file.
type Names = Vec<String>;

pub(crate) struct Crate {
    files: Vec<File>,
    /// For each module, the index of its file in `files`.
    modules: BTreeMap<Names, usize>,
}

struct File {
    module: Names,
    name: String,
    /// The paths of the items that the file names, from the crate's root.
    uses: Vec<Names>,
    /// The paths of the items that the file re-exports, by the re-exported name.
    exports: BTreeMap<String, Names>,
}

impl Crate {
    pub(crate) fn read(folder: &Path) -> Result<Self, String> {
        let mut files = Vec::new();
        read_below(folder, &mut Vec::new(), &mut files)?;
        let modules = files.iter().enumerate().map(|(at, file)| (file.module.clone(), at)).collect();
        Ok(Self { files, modules })
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.files.iter().map(|file| file.name.as_str())
    }

    /// Returns, for each file, the indexes of the other files that it needs.
    pub(crate) fn needs(&self) -> Vec<BTreeSet<usize>> {
        let needs = |(at, file): (usize, &File)| {
            file.uses.iter().filter_map(|names| self.file_of(names)).filter(|other| *other != at).collect()
        };
        self.files.iter().enumerate().map(needs).collect()
    }

    fn file_of(&self, names: &Names) -> Option<usize> {
        let mut names = names.clone();
        // A re-export may lead to another re-export, so the lookup is repeated.
        for _ in 0..16 {
            let length = (0..=names.len()).rev().find(|length| self.modules.contains_key(&names[..*length]))?;
            let at = self.modules[&names[..length]];
            let Some(exported) = names.get(length).and_then(|name| self.files[at].exports.get(name)) else {
                return Some(at);
            };
            names = exported.iter().chain(&names[length + 1..]).cloned().collect();
        }
        None
    }
}

fn read_below(folder: &Path, module: &mut Names, files: &mut Vec<File>) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", folder.display());
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let stem = path.file_stem().and_then(OsStr::to_str).unwrap_or_default().to_owned();
        if stem == "tests" || stem.ends_with("_tests") {
            continue;
        }
        let is_module = !["lib", "main", "mod"].contains(&stem.as_str());
        if is_module {
            module.push(stem);
        }
        if path.is_dir() {
            read_below(&path, module, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).map_err(failed)?;
            let parsed = syn::parse_file(&text).map_err(|error| format!("{}: {error}", path.display()))?;
            let name = if module.is_empty() { "the root".to_owned() } else { module.join("::") };
            let file = File { module: module.clone(), name, uses: Vec::new(), exports: BTreeMap::new() };
            let mut reader = Reader { file, place: module.clone() };
            reader.visit_file(&parsed);
            files.push(reader.file);
        }
        if is_module {
            module.pop();
        }
    }
    Ok(())
}

/// Collects the paths of items that a source file names.
struct Reader {
    file: File,
    /// The module whose items are being read: the module of the file, or a module nested in the file.
    place: Names,
}

impl Reader {
    /// Converts a path that a source file contains to a path from the crate's root. An item of another crate wrongly
    /// gets a path in the file's own module, which is harmless because a file never counts as needing itself.
    fn absolute(&self, names: &[String]) -> Names {
        let (mut place, mut rest) = (self.place.clone(), names);
        while let Some((first, after)) = rest.split_first() {
            match first.as_str() {
                "crate" => place.clear(),
                "self" => {}
                "super" => drop(place.pop()),
                _ => break,
            }
            rest = after;
        }
        place.into_iter().chain(rest.iter().cloned()).collect()
    }

    fn names(&mut self, names: &[String]) {
        if names.first().is_some_and(|first| ["crate", "self", "super"].contains(&first.as_str())) && names.len() > 1 {
            self.file.uses.push(self.absolute(names));
        }
    }

    fn tree(&mut self, tree: &UseTree, before: &mut Names, exports: bool) {
        match tree {
            UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.tree(&path.tree, before, exports);
                before.pop();
            }
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.tree(tree, before, exports)),
            UseTree::Name(name) => self.leaf(&name.ident.to_string(), None, before, exports),
            UseTree::Rename(rename) => {
                self.leaf(&rename.ident.to_string(), Some(rename.rename.to_string()), before, exports);
            }
            UseTree::Glob(_) if exports => {}
            UseTree::Glob(_) => self.file.uses.push(self.absolute(before)),
        }
    }

    fn leaf(&mut self, name: &str, renamed: Option<String>, before: &Names, exports: bool) {
        let mut names = before.clone();
        if name != "self" {
            names.push(name.to_owned());
        }
        let absolute = self.absolute(&names);
        if exports {
            let exported = renamed.or_else(|| names.last().cloned()).unwrap_or_default();
            self.file.exports.insert(exported, absolute);
        } else {
            self.file.uses.push(absolute);
        }
    }

    /// Collects the paths of items in the tokens of a macro call.
    fn tokens(&mut self, tokens: &TokenStream) {
        let text = tokens.to_string().replace(" :: ", "::");
        let is_of_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
        for word in text.split(|c: char| !is_of_path(c)).filter(|word| word.contains("::")) {
            let names: Names = word.split("::").map(str::to_owned).collect();
            self.names(&names);
        }
    }
}

fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.meta.require_list().is_ok_and(|list| list.tokens.to_string() == "test")
    })
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_item(&mut self, item: &'ast Item) {
        let attributes = match item {
            Item::Mod(item) => &item.attrs,
            Item::Use(item) => &item.attrs,
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            _ => return visit::visit_item(self, item),
        };
        if !is_for_tests(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        self.place.push(item.ident.to_string());
        visit::visit_item_mod(self, item);
        self.place.pop();
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        let exports = !matches!(item.vis, Visibility::Inherited);
        self.tree(&item.tree, &mut Vec::new(), exports);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Names = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        self.names(&names);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, called: &'ast Macro) {
        self.tokens(&called.tokens);
        visit::visit_macro(self, called);
    }

    fn visit_item_macro(&mut self, item: &'ast syn::ItemMacro) {
        self.tokens(&item.mac.tokens);
        visit::visit_item_macro(self, item);
    }
}
