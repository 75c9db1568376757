//! Tests the daemon's web page in Debian's Chromium, as a person sees the page.
//!
//! Without Chromium, the test cases are ignored with a message; in CI, the test cases fail. The environment variable
//! PAGE_PICTURES names a folder for screenshots.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod page_support;

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use ipam_core::assign::RequestedAddresses;
use libtest_mimic::{Arguments, Trial};
use page_support::browser::{Driver, Look, WIDE, Window, missing};
use page_support::{Daemon, SCRIPT, add, container, empty, many_blocks, pool, soon, three_pools};
use serde_json::{Value, json};
use serve::http::ClientLimits;

/// WebDriver's key codes of Tab, Enter and other special keys.
const TAB: &str = "\u{e004}";
const ENTER: &str = "\u{e007}";
const ESCAPE: &str = "\u{e00c}";
const RIGHT: &str = "\u{e014}";
const DOWN: &str = "\u{e015}";
const END: &str = "\u{e010}";

const NARROW: Look = Look { width: 360, height: 800, colours: "light" };
const DARK: Look = Look { width: 1440, height: 900, colours: "dark" };

/// The name of a test case and the function that runs its steps.
type Case = (&'static str, fn(&Driver));

fn main() -> ExitCode {
    let cases: [Case; 11] = [
        ("page_says_what_to_do_when_store_is_empty", page_says_what_to_do_when_store_is_empty),
        ("page_shows_pools_as_bars_with_numbers", page_shows_pools_as_bars_with_numbers),
        ("page_shows_names_as_text_and_never_html", page_shows_names_as_text_and_never_html),
        ("page_search_finds_address_container_pod_and_node", page_search_finds_address_container_pod_and_node),
        ("page_shows_history_of_address", page_shows_history_of_address),
        ("page_shows_events_live", page_shows_events_live),
        ("page_works_by_keyboard", page_works_by_keyboard),
        ("page_draws_only_blocks_in_sight", ten_thousand_blocks),
        ("page_shows_problems_with_repair_command", page_shows_problems_with_repair_command),
        ("page_fits_narrow_windows_and_keeps_colors", no_window_is_too_narrow),
        ("page_tells_when_daemon_goes_and_comes_back", page_tells_when_daemon_goes_and_comes_back),
    ];
    let reason = missing();
    // All test cases share one browser, because starting a browser takes longer than most cases.
    let browser = Arc::new(Mutex::new(None));
    let in_ci = std::env::var_os("CI").is_some_and(|value| !value.is_empty() && value != "false");
    let trials = cases.into_iter().map(|(name, case)| {
        let (why, browser) = (reason.clone(), Arc::clone(&browser));
        let trial = Trial::test(name, move || match why {
            Some(why) => Err(why.into()),
            None => {
                // A test case that panicked has already closed its windows.
                case(browser.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(Driver::start));
                Ok(())
            }
        });
        match &reason {
            Some(reason) if !in_ci => trial.with_kind(reason.clone()).with_ignored_flag(true),
            _ => trial,
        }
    });
    let mut arguments = Arguments::from_args();
    // The browser can run only one test case at a time.
    arguments.test_threads = arguments.test_threads.or(Some(1));
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

fn is_clean(window: &Window<'_>) {
    assert!(!window.has_dialog(), "the page asks something");
    assert_eq!(window.console(), Vec::<String>::new(), "the console is empty");
    let asked = window.value("performance.getEntriesByType('resource').map((one) => one.name)");
    let origin = window.value("location.origin");
    for one in asked.as_array().unwrap() {
        let one = one.as_str().unwrap();
        assert!(one.starts_with(origin.as_str().unwrap()) || one.starts_with("data:"), "it asked {one}");
    }
}

fn fits(window: &Window<'_>) {
    let over = window.value(
        "[...document.querySelectorAll('body *')].filter((one) => one.getBoundingClientRect().right > innerWidth + 1 \
         && !one.closest('.skip, thead, .table, .map')).map((one) => one.className || one.tagName).slice(0, 5)",
    );
    assert_eq!(over, json!([]), "this is wider than the window");
    assert_eq!(window.value("document.documentElement.scrollWidth <= innerWidth"), Value::Bool(true));
}

fn page_says_what_to_do_when_store_is_empty(driver: &Driver) {
    let daemon = Daemon::new(async || empty());
    let window = Window::open(driver, WIDE);
    window.go(&daemon.url());
    window.wait_text("There is no pool yet");
    window.wait_text("margay pool create NAME CIDR");
    window.wait_text("Margay 0.2.0, redb, redb:///var/lib/margay/ipam.redb");
    window.picture("empty");
    daemon.run(pool(&daemon.ipam, "first", "10.9.0.0/24", 26));
    window.wait("document.querySelector('.pool .name')?.textContent === 'first'");
    is_clean(&window);
}

fn page_shows_pools_as_bars_with_numbers(driver: &Driver) {
    let daemon = Daemon::new(three_pools);
    let window = Window::open(driver, WIDE);
    window.go(&daemon.url());
    window.wait("document.querySelectorAll('.pool').length === 3");
    window.wait_text("full in about 29 days, from 5 days of history");
    let bars = window.value(
        "[...document.querySelectorAll('.bar')].map((bar) => [...bar.children].map((part) => [part.className, \
         part.getBoundingClientRect().width / bar.getBoundingClientRect().width]))",
    );
    let part =
        |bar: usize, place: usize| (bars[bar][place][0].as_str().unwrap(), bars[bar][place][1].as_f64().unwrap());
    for (place, name, share) in [(0, "used", 131.0), (1, "resting", 20.0), (2, "reserved", 128.0)] {
        let (found, width) = part(0, place);
        assert!(found == name && (width - share / 1024.0).abs() < 0.01, "{found} {width}");
    }
    assert!(part(2, 0).1 > 0.0, "a little is a hair wide");
    let label = window.value("document.querySelector('.bar').getAttribute('aria-label')");
    assert_eq!(label, "Addresses: in use 131, borrowed 0, cooldown 20, reserved 128, free 745");
    window.picture("three");
    window.go(&format!("{}/#/pool/default", daemon.url()));
    window.wait("document.getElementById('map')?.dataset.drawn > 0");
    window.wait_text("3 of 16 are there");
    window.run("location.hash = '#/block/10.65.0.64/26'");
    window.wait("document.querySelectorAll('.cell').length === 64");
    window.picture("block");
    is_clean(&window);
}

fn page_shows_names_as_text_and_never_html(driver: &Driver) {
    let daemon = Daemon::new(async || {
        let ipam = empty();
        pool(&ipam, "main", "10.1.0.0/24", 26).await;
        for (number, pod) in
            [SCRIPT, "<img src=x onerror=alert(2)>", "\"><svg onload=alert(3)>"].into_iter().enumerate()
        {
            add(&ipam, "n<b>1</b>", &format!("<i>{number}</i>"), pod, RequestedAddresses::any(1, 0), &[]).await;
        }
        ipam
    });
    let window = Window::open(driver, WIDE);
    let scripts = "document.querySelectorAll('main script, main img, main svg, main b b, main i i').length";
    for place in [
        "",
        "block/10.1.0.0/26",
        "address/10.1.0.0",
        "search/script",
        "search/%3Cimg%20src=x%20onerror=alert(4)%3E",
        "events",
        "pod/shop/<script>alert(1)</script>",
        "node/n%3Cb%3E1%3C/b%3E",
        "container/%3Ci%3E0%3C%2Fi%3E",
        "pool/<script>",
        "problems",
    ] {
        window.go(&format!("{}/#/{place}", daemon.url()));
        window.run("location.reload()");
        window.wait("document.querySelector('main h1') && !document.querySelector('.loading')");
        assert_eq!(window.value(scripts), 0, "{place}");
        assert!(!window.has_dialog(), "{place}");
    }
    window.go(&format!("{}/#/search/script", daemon.url()));
    window.wait_text(&format!("shop/{SCRIPT}"));
    window.picture("script");
    window.run("[...document.querySelectorAll('main a')].find((one) => one.textContent.includes('<script>')).click()");
    window.wait(&format!("document.querySelector('h1').textContent === {}", json!(format!("shop/{SCRIPT}"))));
    window.wait_text("assigned");
    assert!(!window.has_dialog());
}

fn page_search_finds_address_container_pod_and_node(driver: &Driver) {
    let daemon = Daemon::new(three_pools);
    let window = Window::open(driver, WIDE);
    window.go(&daemon.url());
    window.wait("document.querySelector('.pool')");
    let ip =
        daemon.run(daemon.ipam.addresses_of_handle(&format!("k8s-pod-network.{}", container(44)), soon())).unwrap()[0];
    let short = &container(44)[..12];
    for text in [ip.to_string(), short.to_owned(), "web-7d9f44".to_owned(), "shop/web-7d9f44".to_owned()] {
        window.press("/");
        window.wait("document.activeElement.id === 'query'");
        window.press(&format!("{text}{ENTER}"));
        window.wait(&format!("document.querySelector('.head p')?.textContent === {}", json!(text)));
        window.wait(&format!("document.querySelectorAll('tbody tr').length === 1 && document.querySelector('tbody a').textContent === '{ip}'"));
    }
    window.press(&format!("/worker-3{ENTER}"));
    window.wait("[...document.querySelectorAll('main a')].some((one) => one.hash === '#/node/worker-3')");
    window.wait("document.querySelectorAll('tbody tr').length > 40");
    window.picture("search");
    window.press(&format!("/no-such-name{ENTER}"));
    window.wait_text("Nothing has this name or address");
    is_clean(&window);
}

fn page_shows_history_of_address(driver: &Driver) {
    let daemon = Daemon::new(async || {
        let ipam = empty();
        pool(&ipam, "main", "10.1.0.0/30", 30).await;
        for number in 0..3 {
            let container = format!("c{number}");
            add(
                &ipam,
                "n1",
                &container,
                &format!("pod-{number}"),
                RequestedAddresses::these(["10.1.0.2".parse().unwrap()]),
                &[],
            )
            .await;
            if number < 2 {
                ipam.release_by_handle(&format!("k8s-pod-network.{container}"), soon()).await.unwrap();
            }
        }
        ipam
    });
    let window = Window::open(driver, WIDE);
    window.go(&format!("{}/#/address/10.1.0.2", daemon.url()));
    window.wait_text("the store can be read back to revision 1");
    let rows = window.value(
        "[...document.querySelectorAll('section tbody tr')].map((row) => [row.cells[1].textContent, row.cells[3].textContent])",
    );
    let reported = [("assigned", 2), ("released", 1), ("assigned", 1), ("released", 0), ("assigned", 0)];
    let expected: Vec<Value> =
        reported.iter().map(|(word, pod)| json!([word, format!("shop/pod-{pod} c{pod}")])).collect();
    assert_eq!(rows.as_array().unwrap()[..5], expected[..]);
    window.picture("address");
    window.run("[...document.querySelectorAll('main a')].find((one) => one.textContent === 'shop/pod-0').click()");
    window.wait("document.querySelector('h1')?.textContent === 'shop/pod-0' && document.querySelectorAll('tbody tr').length === 2");
    window.wait_text("It has no address now.");
    is_clean(&window);
}

fn page_shows_events_live(driver: &Driver) {
    let daemon = Daemon::new(async || {
        let ipam = empty();
        pool(&ipam, "main", "10.1.0.0/24", 26).await;
        add(&ipam, "n1", "before", "pod-before", RequestedAddresses::any(1, 0), &[]).await;
        ipam
    });
    let window = Window::open(driver, WIDE);
    window.go(&format!("{}/#/events", daemon.url()));
    window.wait_text("shop/pod-before");
    window.wait("document.getElementById('live').dataset.state === 'live'");
    daemon.run(add(&daemon.ipam, "n1", "during", "pod-during", RequestedAddresses::any(1, 0), &[]));
    window.wait_text("shop/pod-during");
    daemon.run(daemon.ipam.release_by_handle("k8s-pod-network.before", soon())).unwrap();
    window.wait("document.querySelector('tbody tr').textContent.includes('released')");
    window.run("const filter = document.querySelector('.filter'); filter.value = 'during'; filter.dispatchEvent(new Event('input'))");
    window.wait("document.querySelectorAll('tbody tr').length === 1");
    window.picture("events");
    // The page updates the numbers of the pools when an event arrives.
    window.run("location.hash = '#/'");
    window.wait("document.querySelector('.pool b')?.textContent === '1'");
    daemon.run(add(&daemon.ipam, "n1", "later", "pod-later", RequestedAddresses::any(1, 0), &[]));
    window.wait("document.querySelector('.pool b')?.textContent === '2'");
    is_clean(&window);
}

fn page_works_by_keyboard(driver: &Driver) {
    let daemon = Daemon::new(three_pools);
    let window = Window::open(driver, WIDE);
    window.go(&daemon.url());
    window.wait("document.querySelectorAll('.pool').length === 3");
    let focused = |expression: &str| {
        for _ in 0..40 {
            window.press(TAB);
            if window.value(&format!("Boolean(document.activeElement{expression})")) == Value::Bool(true) {
                return;
            }
        }
        panic!("no Tab comes to {expression}");
    };
    window.press(TAB);
    assert_eq!(window.value("document.activeElement.textContent"), "Skip to the content");
    window.press(ENTER);
    focused(".matches('.pool')");
    let outline = window.value("getComputedStyle(document.activeElement).outlineStyle");
    assert_eq!(outline, "solid", "the focus can be seen");
    window.press(ENTER);
    window.wait("document.getElementById('map')?.dataset.drawn > 0");
    assert_eq!(window.value("document.activeElement.tagName"), "H1", "a new view is read from its heading");
    focused(".id === 'map'");
    window.wait("document.getElementById('tip').innerText.includes('10.65.0.64/26')");
    window.press(RIGHT);
    window.wait("document.querySelector('.chosen').innerText.includes('10.65.0.128/26')");
    window.wait("document.getElementById('tip').innerText.includes('node worker-2')");
    window.picture("keyboard");
    window.press(ENTER);
    window.wait("document.querySelectorAll('.cell').length === 64");
    focused(".matches('.cell')");
    window.press(&format!("{RIGHT}{DOWN}"));
    window.wait("document.activeElement.textContent === '.145'");
    window.wait(
        "!document.getElementById('tip').hidden && document.getElementById('tip').innerText.includes('10.65.0.145')",
    );
    window.press(ENTER);
    window.wait("document.querySelector('h1')?.textContent === '10.65.0.145'");
    window.press("ge");
    window.wait("location.hash === '#/events'");
    window.press("gc");
    window.wait("location.hash === '#/problems'");
    window.press("gp");
    window.wait("location.hash === '#/'");
    window.press("?");
    window.wait("document.getElementById('keys').open");
    window.press(ESCAPE);
    window.wait("!document.getElementById('keys').open");
    window.press("t");
    window.wait("document.documentElement.dataset.theme === 'light'");
    window.press("t");
    window.wait("getComputedStyle(document.body).backgroundColor === 'rgb(19, 23, 22)'");
    window.run("location.reload()");
    window.wait("document.querySelectorAll('.pool').length === 3 && document.documentElement.dataset.theme === 'dark'");
    is_clean(&window);
}

fn ten_thousand_blocks(driver: &Driver) {
    let daemon = Daemon::new(async || many_blocks(10_000).await);
    let window = Window::open(driver, WIDE);
    window.go(&format!("{}/#/pool/large", daemon.url()));
    window.wait("document.getElementById('map')?.dataset.drawn > 0");
    window.wait_text("10,000 blocks");
    let drawn = |at_most: u64| {
        let drawn = window.value("Number(document.getElementById('map').dataset.drawn)").as_u64().unwrap();
        assert!(drawn > 0 && drawn <= at_most, "{drawn} cells drawn");
    };
    drawn(7500);
    let elements = window.value("document.querySelectorAll('*').length").as_u64().unwrap();
    assert!(elements < 1000, "{elements} elements");
    // On a slow machine, the page may request the same URL more than once, so the script counts different URLs.
    let asked = window.value(
        "new Set(performance.getEntriesByType('resource').map((one) => one.name).filter((name) => name.includes('/api/blocks'))).size",
    );
    assert_eq!(asked, 1, "all blocks come in one answer");
    window.picture("many");
    window.run("document.getElementById('map').focus()");
    window.press(END);
    window.wait("document.querySelector('.chosen').innerText.includes('10.9.195.192/26')");
    window.wait("document.getElementById('map').scrollTop > 0");
    drawn(7500);
    window.run("document.getElementById('map').scrollTop = 0; scrollTo(0, 0)");
    let (x, y) = (
        window.value("Math.round(document.getElementById('map').getBoundingClientRect().left + 8)").as_i64().unwrap(),
        window.value("Math.round(document.getElementById('map').getBoundingClientRect().top + 8)").as_i64().unwrap(),
    );
    window.point(x, y);
    window.wait("document.getElementById('tip').innerText.includes('10.0.0.0/26')");
    window.run("document.querySelector('details').open = true");
    window.wait("document.querySelectorAll('tbody tr').length === 200");
    is_clean(&window);
    let narrow = Window::open(driver, NARROW);
    narrow.go(&format!("{}/#/pool/large", daemon.url()));
    narrow.wait("document.getElementById('map')?.dataset.drawn > 0");
    fits(&narrow);
    narrow.picture("many-narrow");
}

fn page_shows_problems_with_repair_command(driver: &Driver) {
    let daemon = Daemon::new(three_pools);
    let window = Window::open(driver, WIDE);
    window.go(&format!("{}/#/problems", daemon.url()));
    window.wait_text("A handle names a block that does not exist");
    window.wait_text("margay ipam check --store redb:///var/lib/margay/ipam.redb --repair HND-04 --apply");
    window.wait("document.querySelector('nav .badge').textContent === '1'");
    window.picture("problems");
    is_clean(&window);
}

fn no_window_is_too_narrow(driver: &Driver) {
    let daemon = Daemon::new(three_pools);
    let places = [
        "",
        "pool/default",
        "block/10.65.0.64/26",
        "address/10.65.0.71",
        "events",
        "problems",
        "search/worker",
        "node/worker-1",
    ];
    let wide = Look { width: 1920, height: 1000, colours: "light" };
    let narrow_dark = Look { colours: "dark", ..NARROW };
    for (name, scan) in [("narrow", NARROW), ("narrow-dark", narrow_dark), ("dark", DARK), ("wide", wide)] {
        let window = Window::open(driver, scan);
        for place in places {
            window.go(&format!("{}/#/{place}", daemon.url()));
            window.wait("document.querySelector('main h1') && !document.querySelector('.loading')");
            fits(&window);
            window.picture(&format!("{name}-{}", place.split('/').next().unwrap()));
        }
        let ground = if scan.colours == "dark" { "rgb(19, 23, 22)" } else { "rgb(244, 245, 243)" };
        assert_eq!(window.value("getComputedStyle(document.body).backgroundColor"), ground);
        is_clean(&window);
    }
    let window = Window::open(driver, NARROW);
    window.go(&Daemon::new(async || empty()).url());
    fits(&window);
}

fn page_tells_when_daemon_goes_and_comes_back(driver: &Driver) {
    let mut daemon = Daemon::new(three_pools);
    let port = daemon.address.port();
    let window = Window::open(driver, WIDE);
    window.go(&daemon.url());
    window.wait("document.getElementById('live').dataset.state === 'live'");
    daemon.stop();
    drop(daemon);
    window.wait_text("The daemon does not answer.");
    assert_eq!(window.value("document.querySelectorAll('.pool').length"), 3, "what was shown stays");
    window.run("location.hash = '#/problems'");
    window.wait_text("The daemon is not there");
    window.wait_text("margay serve");
    window.picture("gone");
    let _again = Daemon::at(three_pools, ClientLimits::default(), port);
    window.wait_text("A handle names a block that does not exist");
    window.wait("document.getElementById('gone').hidden && document.getElementById('live').dataset.state === 'live'");
}
