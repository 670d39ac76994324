//! What people see: tables, and text of the server made harmless.

use serde_json::Value;

/// The text without characters that could steer a terminal.
pub(super) fn clean(text: &str) -> String {
    let harmless = |c: char| {
        if c.is_control() && c != '\n' {
            '\u{fffd}'
        } else {
            c
        }
    };
    text.chars().map(harmless).collect()
}

/// A cell: a text as it is, null as nothing, anything else as JSON.
pub(super) fn cell(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => clean(text).replace('\n', " "),
        other => clean(&other.to_string()),
    }
}

/// A table; columns are a title and a JSON pointer.
pub(super) fn table(items: &[Value], columns: &[(&str, &str)]) -> String {
    let mut rows = vec![
        columns
            .iter()
            .map(|(title, _)| (*title).to_owned())
            .collect::<Vec<_>>(),
    ];
    for item in items {
        let cells = columns
            .iter()
            .map(|(_, at)| cell(item.pointer(at).unwrap_or(&Value::Null)));
        rows.push(cells.collect());
    }
    let width = |i: usize| {
        rows.iter()
            .map(|row| row[i].chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns.len()).map(width).collect();
    let mut text = String::new();
    for row in &rows {
        let line: String = row
            .iter()
            .zip(&widths)
            .map(|(c, w)| format!("{c:<w$}  "))
            .collect();
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
