//! Environment variables, looked up as Calico does.

/// A lookup of one environment variable by its exact name; `None` if it is not set.
pub type Environment<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// The environment of this process. Bytes that are not UTF-8 become replacement characters.
pub fn process_environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// The variable with the prefix `CALICO_`, which beats everything else. Set but empty counts as set.
pub(crate) fn overriding(env: &Environment<'_>, name: &str) -> Option<String> {
    env(&format!("CALICO_{name}"))
}

/// A variable, with the prefix first; empty if neither is set.
pub(crate) fn variable(env: &Environment<'_>, name: &str) -> String {
    overriding(env, name).or_else(|| env(name)).unwrap_or_default()
}
