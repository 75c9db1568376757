//! Tests `margay ipam map` and `margay metrics`.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::common::Lab;

/// Creates a store with a pool of two blocks, of which one is claimed, and a large pool without claimed blocks.
fn filled(lab: &Lab) -> Vec<String> {
    assert_eq!(lab.margay("pool create main 10.65.0.0/29 --block-size 30").code, 0);
    assert_eq!(lab.margay("reservation create kept 10.65.0.0/30").code, 0);
    let given = (0..3).map(|number| lab.assign("net", &format!("c{number}"))).collect();
    // The plugin assigns from the pool whose name sorts first, so the test creates the pool `big` only after it has
    // assigned its addresses.
    assert_eq!(lab.margay("pool create big 10.80.0.0/16").code, 0);
    given
}

#[test]
fn map_draws_blocks_as_they_are() {
    for lab in Lab::each() {
        let given = filled(&lab);
        let drawn = lab.margay("ipam map --pool main").answer();
        let lines: Vec<&str> = drawn.lines().collect();
        assert_eq!(lines[0], "main  10.65.0.0/29  1 of 2 blocks claimed: 3 in use, 1 free", "{drawn}");
        let mut signs = ['.'; 4];
        for ip in &given {
            let last: usize = ip.rsplit('.').next().unwrap().parse().unwrap();
            signs[last - 4] = '#';
        }
        assert_eq!(lines[1], format!("10.65.0.4/30  node1  {}  3/4", signs.iter().collect::<String>()));
        assert_eq!(
            lines[3],
            ". free   # in use   b borrowed by another node   ~ in cooldown   r reserved   + some in use"
        );
        let drawn = lab.margay("ipam map --blocks --pool 10.65.0.0/29").answer();
        assert_eq!(drawn.lines().nth(1), Some("10.65.0.0  -7"), "{drawn}");
        let all = lab.margay("ipam map").answer();
        assert!(all.contains("big  10.80.0.0/16  0 of 1024 blocks claimed\n"), "{all}");
        let json = lab.margay("ipam map -o json").json();
        assert_eq!(json["pools"][1]["blocks"][0]["in_use"], 3);
        assert_eq!(json["pools"][1]["blocks"][0]["addresses"].as_str().unwrap().len(), 4);
        let failure = lab.margay("ipam map --pool none").failure();
        assert!(failure.contains("there is no pool none") && failure.contains("margay pool list"), "{failure}");
    }
}

#[test]
fn map_says_what_to_do_when_store_is_empty() {
    let [lab, _] = Lab::each();
    assert_eq!(lab.margay("pool create main 10.65.0.0/29").code, 0);
    assert_eq!(lab.margay("pool delete main").code, 0);
    let done = lab.margay("ipam map");
    assert!(done.code == 0 && done.err.contains("margay pool create"), "{}", done.err);
}

#[test]
fn map_pictures_are_whole_files() {
    let [lab, _] = Lab::each();
    filled(&lab);
    let (svg, html) = (lab.folder().join("a.svg"), lab.folder().join("a.html"));
    let reported = lab.margay(&format!("ipam map --svg {} --html {}", svg.display(), html.display())).answer();
    assert_eq!(reported.lines().count(), 2, "{reported}");
    let picture = fs::read_to_string(&svg).unwrap();
    assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"));
    assert!(picture.contains("<title>10.65.0.4/30 (node1): 3 of 4 in use</title>"), "{picture}");
    assert!(picture.contains("1 of 2 blocks claimed: 3 in use, 1 free"));
    let page = fs::read_to_string(&html).unwrap();
    assert!(page.contains(&picture) && page.contains("at revision"));
    assert_eq!(fs::metadata(&svg).unwrap().permissions().mode() & 0o777, 0o644);
    let failure = lab.margay(&format!("ipam map --svg {}/none/a.svg", lab.folder().display())).failure();
    assert!(failure.contains("cannot write"), "{failure}");
    assert_eq!(
        fs::read_dir(lab.folder())
            .unwrap()
            .filter(|entry| { entry.as_ref().unwrap().file_name().to_string_lossy().contains(".part") })
            .count(),
        0
    );
}

#[test]
fn map_numbers_match_store() {
    for lab in Lab::each() {
        filled(&lab);
        let text = lab.margay("metrics --node node1").answer();
        for line in [
            r#"margay_pool_size_addresses{pool="main",cidr="10.65.0.0/29"} 8"#,
            r#"margay_pool_addresses{pool="main",cidr="10.65.0.0/29",state="in-use"} 3"#,
            r#"margay_pool_addresses{pool="main",cidr="10.65.0.0/29",state="reserved"} 4"#,
            r#"margay_pool_addresses{pool="main",cidr="10.65.0.0/29",state="free"} 1"#,
            r#"margay_pool_blocks{pool="main",cidr="10.65.0.0/29"} 1"#,
            r#"margay_pool_full_blocks{pool="main",cidr="10.65.0.0/29"} 0"#,
            r#"margay_pool_borrowed_addresses{pool="main",cidr="10.65.0.0/29"} 0"#,
            "margay_blocks_without_pool 0",
            "margay_nodes 1",
            // The metrics count an address as leaked if it was assigned before the machine's last boot, as the three
            // addresses of this test were.
            r#"margay_leaked_addresses{reason="earlier-boot"} 3"#,
            r#"margay_leaked_addresses{reason="node-gone"} 0"#,
            "margay_store_oldest_revision 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert!(lab.margay("metrics --node other").answer().contains(r#"{reason="earlier-boot"} 0"#));
        let file = lab.folder().join("margay.prom");
        lab.margay(&format!("metrics --file {}", file.display())).answer();
        assert!(fs::read_to_string(&file).unwrap().contains("margay_store_revision "));
    }
}
