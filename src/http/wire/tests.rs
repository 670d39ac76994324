//! Tests of the wire types.

use super::*;

fn refused(body: &str) -> (u16, Option<String>, String) {
    let problem = CreateVolume::parse(body.as_bytes()).unwrap_err();
    (
        problem.status,
        problem.field.map(String::from),
        problem.detail.into(),
    )
}

#[test]
fn sizes_are_read_or_refused_with_the_field() {
    for size in ["10", "\"10B\""] {
        let body = format!(r#"{{"name":"a","size":{size}}}"#);
        assert_eq!(
            CreateVolume::parse(body.as_bytes()).unwrap().size_bytes,
            Some(10)
        );
    }
    for size in [
        "-1",
        "0",
        "18446744073709551616",
        "9223372036854775808",
        "1.5",
        "null",
        "\"x\"",
        "true",
        "[]",
    ] {
        let (status, field, detail) = refused(&format!(r#"{{"name":"a","size":{size}}}"#));
        assert_eq!(
            (status, field.as_deref()),
            (422, Some("size")),
            "{size}: {detail}"
        );
    }
}

#[test]
fn faults_of_a_body_name_the_place() {
    let (status, _, detail) = refused("{\"name\":\n  oops}");
    assert_eq!(status, 400);
    assert!(detail.contains("line 2 column"), "{detail}");
    assert_eq!(
        refused(r#"{"name":"a","size":1,"nmae":1}"#).1.as_deref(),
        Some("nmae")
    );
    assert_eq!(
        refused(r#"{"name":"A","size":1}"#).1.as_deref(),
        Some("name")
    );
    assert_eq!(refused(r#"{"size":1}"#).1.as_deref(), Some("name"));
    assert_eq!(
        refused(r#"{"name":"a","source":{"file":"/x"}}"#)
            .1
            .as_deref(),
        Some("source.format")
    );
    assert_eq!(
        refused(r#"{"name":"a","size":1,"qos":{"iop":1}}"#)
            .1
            .as_deref(),
        Some("qos.iop")
    );
    assert_eq!(refused("[]").0, 422);
}

#[test]
fn the_same_request_in_other_words_is_the_same() {
    let normal = |body: &str| {
        CreateVolume::parse(body.as_bytes())
            .unwrap()
            .normalised(Some("c"))
    };
    let kept = normal(r#"{"name":"a","size":"1KiB","labels":{"x":"1"}}"#);
    let same = normal(r#"{"labels":{"x":"1"},"size":1024,"name":"a","class":"c","qos":{}}"#);
    assert_eq!(differences(&kept, &same), Vec::<String>::new());
    let other = normal(r#"{"name":"a","size":1025}"#);
    assert_eq!(differences(&kept, &other), ["labels", "size"]);
}

#[test]
fn queries_are_strict() {
    let query = ListQuery::parse("limit=5&label=a%3Db+c&phase=ready").unwrap();
    assert_eq!(
        (query.limit, query.label),
        (5, Some(("a".into(), "b c".into())))
    );
    for bad in [
        "limit=0",
        "limit=1001",
        "x=1",
        "phase=trashed",
        "label=a",
        "limit=1&limit=2",
    ] {
        assert_eq!(ListQuery::parse(bad).unwrap_err().status, 422, "{bad}");
    }
    assert_eq!(ListQuery::parse("class=%zz").unwrap_err().status, 400);
    assert_eq!(ObjectQuery::parse("wait=90s").unwrap().wait_ms, 60_000);
    assert_eq!(
        ObjectQuery::parse("wait=5").unwrap_err().field.as_deref(),
        Some("wait")
    );
}

#[test]
fn times_have_milliseconds() {
    assert_eq!(time(Millis(1_500)), "1970-01-01T00:00:01.500Z");
    assert_eq!(time(Millis(1_000)), "1970-01-01T00:00:01.000Z");
}
