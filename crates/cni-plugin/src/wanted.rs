//! The addresses that a caller wants to have and no others.

use std::net::IpAddr;

use agent::{CniError, Result};

use crate::args::{AddressForm, Args, parse_address};
use crate::gojson::Json;
use crate::netconf::NetConf;

/// The wanted addresses of all three sources together, each once: `IP` in `CNI_ARGS`, then `args.cni.ips`, then
/// `runtimeConfig.ips`. Nothing says that one source overrules another, so all of them are wanted; an address that is
/// named twice is wanted once.
///
/// # Errors
/// Code 7 for what is no address.
pub(crate) fn wanted(conf: &NetConf, args: &Args) -> Result<Vec<IpAddr>> {
    let mut wanted: Vec<IpAddr> = args.ip.into_iter().collect();
    for (setting, value) in [("args.cni.ips", &conf.args_ips), ("runtimeConfig.ips", &conf.runtime_ips)] {
        let elements = value.as_ref().map(Json::one_or_many).unwrap_or_default();
        for element in elements {
            let text =
                element.as_str().ok_or_else(|| CniError::config(format!("{setting} must be a list of addresses")))?;
            let address = parse_address(text, AddressForm::BareOrCidr)
                .map_err(|error| CniError::config(error).with_details(format!("in {setting}")))?;
            if !wanted.contains(&address) {
                wanted.push(address);
            }
        }
    }
    Ok(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted_by(json: &str, ip: &str) -> Result<Vec<String>> {
        let conf = NetConf::decode(&Json::parse(json.as_bytes()).unwrap()).unwrap();
        let args = Args { ip: ip.parse().ok(), ..Args::default() };
        Ok(wanted(&conf, &args)?.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn the_sources_add_up() {
        let json = r#"{"args":{"cni":{"ips":["10.0.0.2/24","fd00::1"]}},"runtimeConfig":{"ips":["10.0.0.3","10.0.0.1","FD00::1/64"]}}"#;
        assert_eq!(wanted_by(json, "10.0.0.1").unwrap(), ["10.0.0.1", "10.0.0.2", "fd00::1", "10.0.0.3"]);
        assert_eq!(wanted_by(json, "").unwrap(), ["10.0.0.2", "fd00::1", "10.0.0.3", "10.0.0.1"]);
        assert!(wanted_by("{}", "").unwrap().is_empty());
        assert_eq!(wanted_by(r#"{"runtimeConfig":{"ips":"10.0.0.3"}}"#, "").unwrap(), ["10.0.0.3"]);
    }

    #[test]
    fn what_is_no_address() {
        let error = wanted_by(r#"{"runtimeConfig":{"ips":["10.0.0"]}}"#, "").unwrap_err();
        assert_eq!((error.code().number(), error.message()), (7, "invalid IP address: 10.0.0"));
        assert_eq!(error.details(), "in runtimeConfig.ips");
        for json in [r#"{"args":{"cni":{"ips":[1]}}}"#, r#"{"args":{"cni":{"ips":{}}}}"#] {
            assert_eq!(wanted_by(json, "").unwrap_err().message(), "args.cni.ips must be a list of addresses");
        }
    }
}
