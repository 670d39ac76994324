//! Request bodies: read strictly, normalised, compared.

use super::Problem;
use crate::model::{Name, SourceFormat, parse_size};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// `POST /v1/volumes`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateVolume {
    /// The name.
    pub name: Name,
    /// Bytes; `None` leaves it to the source.
    pub size_bytes: Option<u64>,
    /// The class; `None` is the default one.
    pub class: Option<String>,
    /// What it is made from.
    pub source: Option<SourceRequest>,
    /// Limits on its I/O.
    pub qos: Option<crate::model::Qos>,
    /// How it is encrypted.
    pub encryption: Option<EncryptionRequest>,
    /// Free text.
    pub labels: BTreeMap<String, String>,
}

/// What a volume shall be made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceRequest {
    /// A snapshot.
    Snapshot(Name),
    /// Another volume.
    Volume(Name),
    /// A file: its absolute path and its format.
    File(String, SourceFormat),
}

/// How a volume shall be encrypted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncryptionRequest {
    /// The key, by id.
    pub key_id: String,
}

/// `PATCH /v1/volumes/{name}`. `None` leaves a thing as it is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PatchVolume {
    /// The new size in bytes.
    pub size_bytes: Option<u64>,
    /// The new limits; `Some(None)` (JSON null) takes them off.
    pub qos: Option<Option<crate::model::Qos>>,
    /// The new labels, all of them.
    pub labels: Option<BTreeMap<String, String>>,
    /// Only if the volume has that generation.
    pub if_generation: Option<u64>,
}

/// `POST /v1/snapshots`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateSnapshot {
    /// The name.
    pub name: Name,
    /// Of which volume.
    pub volume: Name,
    /// Free text.
    pub labels: BTreeMap<String, String>,
}

/// `POST /v1/trash/{uid}/restore`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Restore {
    /// The name it gets; `None` is its old one.
    pub name: Option<Name>,
}

/// The fields of a JSON object; an empty body is an empty object.
///
/// # Errors
/// 400 with line and column when it isn't JSON, 422 when it isn't an object.
pub fn parse_body(bytes: &[u8]) -> Result<Map<String, Value>, Problem> {
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Ok(Map::new());
    }
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(Problem::new(
            422,
            "invalid",
            format!("the body is {}; send a JSON object", kind(&other)),
        )),
        Err(error) => Err(Problem::new(
            400,
            "malformed",
            format!("the body is no JSON: {error}"),
        )),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Takes fields out of an object; what is left at the end is unknown.
struct Fields {
    path: String,
    map: Map<String, Value>,
    known: Vec<&'static str>,
}

impl Fields {
    fn new(map: Map<String, Value>) -> Fields {
        Fields {
            path: String::new(),
            map,
            known: Vec::new(),
        }
    }

    fn path(&self, name: &str) -> String {
        if self.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.path)
        }
    }

    /// The field, with null as "not there".
    fn take(&mut self, name: &'static str) -> Option<Value> {
        self.known.push(name);
        self.map.remove(name).filter(|value| !value.is_null())
    }

    fn wrong(&self, name: &str, value: &Value, needed: &str) -> Problem {
        let field = self.path(name);
        let detail = format!("{field} is {}; {needed}", kind(value));
        Problem::invalid(field, detail)
    }

    fn text(&mut self, name: &'static str) -> Result<Option<String>, Problem> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(name, &other, "a text is needed")),
        }
    }

    fn name(&mut self, name: &'static str) -> Result<Option<Name>, Problem> {
        let Some(text) = self.text(name)? else {
            return Ok(None);
        };
        let field = self.path(name);
        text.parse()
            .map(Some)
            .map_err(|error| Problem::invalid(field.clone(), format!("{field}: {error}")))
    }

    fn needed<T>(&self, name: &str, value: Option<T>) -> Result<T, Problem> {
        value.ok_or_else(|| {
            let field = self.path(name);
            Problem::invalid(field.clone(), format!("{field} is missing; it is required"))
        })
    }

    /// A whole number from 1, also as a size with a unit where `unit` says so.
    fn number(&mut self, name: &'static str, unit: bool) -> Result<Option<u64>, Problem> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        let field = self.path(name);
        let refuse = |why: String| Problem::invalid(field.clone(), format!("{field}: {why}"));
        let number = match &value {
            Value::Number(number) => number.as_u64().ok_or_else(|| {
                refuse(format!(
                    "{number} is no whole number from 1 to 9223372036854775807"
                ))
            })?,
            Value::String(text) if unit => {
                parse_size(text).map_err(|error| refuse(format!("{text:?}: {error}")))?
            }
            _ if unit => {
                return Err(self.wrong(
                    name,
                    &value,
                    "an integer of bytes or a text such as \"10GiB\" is needed",
                ));
            }
            _ => return Err(self.wrong(name, &value, "a whole number is needed")),
        };
        if number == 0 {
            return Err(refuse("0 is too small; use 1 or more".to_owned()));
        }
        if i64::try_from(number).is_err() {
            return Err(refuse(format!("{number} is above 9223372036854775807")));
        }
        Ok(Some(number))
    }

    fn object(&mut self, name: &'static str) -> Result<Option<Fields>, Problem> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Fields {
                path: self.path(name),
                map,
                known: Vec::new(),
            })),
            Some(other) => Err(self.wrong(name, &other, "an object is needed")),
        }
    }

    fn labels(&mut self) -> Result<Option<BTreeMap<String, String>>, Problem> {
        let Some(fields) = self.object("labels")? else {
            return Ok(None);
        };
        let mut labels = BTreeMap::new();
        for (key, value) in fields.map.clone() {
            let Value::String(text) = value else {
                return Err(fields.wrong(&key, &value, "a text is needed"));
            };
            let bad =
                |why: &str| Problem::invalid(fields.path(&key), format!("label {key:?}: {why}"));
            if key.is_empty()
                || key.len() > 63
                || key.contains(['=', ','])
                || key.chars().any(char::is_control)
            {
                return Err(bad(
                    "its key has 1 to 63 bytes without '=', ',' and control characters",
                ));
            }
            if text.len() > 255 || text.chars().any(char::is_control) {
                return Err(bad(
                    "its value has at most 255 bytes without control characters",
                ));
            }
            labels.insert(key, text);
        }
        if labels.len() > 64 {
            return Err(Problem::invalid(
                "labels",
                "there are at most 64 labels; remove some",
            ));
        }
        Ok(Some(labels))
    }

    fn qos(&mut self) -> Result<Option<crate::model::Qos>, Problem> {
        let Some(mut fields) = self.object("qos")? else {
            return Ok(None);
        };
        let qos = crate::model::Qos {
            iops: fields.number("iops", false)?,
            bytes_per_second: fields.number("bytes_per_second", true)?,
        };
        fields.finish()?;
        Ok((qos != crate::model::Qos::default()).then_some(qos))
    }

    fn source(&mut self) -> Result<Option<SourceRequest>, Problem> {
        let Some(mut fields) = self.object("source")? else {
            return Ok(None);
        };
        let (snapshot, volume) = (fields.name("snapshot")?, fields.name("volume")?);
        let (file, format) = (fields.text("file")?, fields.text("format")?);
        fields.finish()?;
        let source = match (snapshot, volume, file, format.as_deref()) {
            (Some(name), None, None, None) => SourceRequest::Snapshot(name),
            (None, Some(name), None, None) => SourceRequest::Volume(name),
            (None, None, Some(path), Some("raw")) => SourceRequest::File(path, SourceFormat::Raw),
            (None, None, Some(path), Some("qcow2")) => {
                SourceRequest::File(path, SourceFormat::Qcow2)
            }
            (None, None, Some(_), _) => {
                return Err(Problem::invalid(
                    "source.format",
                    "source.format must be \"raw\" or \"qcow2\": a format is never guessed",
                ));
            }
            _ => {
                return Err(Problem::invalid(
                    "source",
                    "source must be one of {\"snapshot\":NAME}, {\"volume\":NAME} or \
                     {\"file\":PATH,\"format\":\"raw|qcow2\"}",
                ));
            }
        };
        if let SourceRequest::File(path, _) = &source
            && !path.starts_with('/')
        {
            return Err(Problem::invalid(
                "source.file",
                "source.file must be an absolute path",
            ));
        }
        Ok(Some(source))
    }

    fn finish(self) -> Result<(), Problem> {
        match self
            .map
            .keys()
            .find(|key| !self.known.contains(&key.as_str()))
        {
            None => Ok(()),
            Some(key) => {
                let field = self.path(key);
                let known = self.known.join(", ");
                Err(Problem::invalid(
                    field.clone(),
                    format!("{field:?} is no field here; known ones are {known}"),
                ))
            }
        }
    }
}

impl CreateVolume {
    /// Reads a body.
    ///
    /// # Errors
    /// 400 or 422, naming the field.
    pub fn parse(bytes: &[u8]) -> Result<CreateVolume, Problem> {
        let mut fields = Fields::new(parse_body(bytes)?);
        let name = fields.name("name")?;
        let size_bytes = fields.number("size", true)?;
        let class = fields.text("class")?;
        let source = fields.source()?;
        let qos = fields.qos()?;
        let encryption = match fields.object("encryption")? {
            None => None,
            Some(mut inner) => {
                let key_id = inner.text("key_id")?;
                let key_id = inner.needed("key_id", key_id)?;
                inner.finish()?;
                Some(EncryptionRequest { key_id })
            }
        };
        let labels = fields.labels()?.unwrap_or_default();
        let name = fields.needed("name", name)?;
        if source.is_none() {
            fields.needed("size", size_bytes)?;
        }
        fields.finish()?;
        Ok(CreateVolume {
            name,
            size_bytes,
            class,
            source,
            qos,
            encryption,
            labels,
        })
    }

    /// The normal form for comparing repeats: equal requests give equal texts, however sizes and
    /// spaces were written. `default_class` stands in where none is named.
    #[must_use]
    pub fn normalised(&self, default_class: Option<&str>) -> String {
        let source = self.source.as_ref().map(|source| match source {
            SourceRequest::Snapshot(name) => json!({"snapshot": name}),
            SourceRequest::Volume(name) => json!({"volume": name}),
            SourceRequest::File(path, format) => json!({"file": path, "format": format}),
        });
        json!({
            "size": self.size_bytes,
            "class": self.class.as_deref().or(default_class),
            "source": source,
            "qos": self.qos,
            "encryption": self.encryption.as_ref().map(|e| json!({"key_id": e.key_id})),
            "labels": self.labels,
        })
        .to_string()
    }
}

/// The fields in which two normalised requests differ, for 409 `conflict`.
#[must_use]
pub fn differences(kept: &str, new: &str) -> Vec<String> {
    let read = |text: &str| serde_json::from_str::<Map<String, Value>>(text).unwrap_or_default();
    let (kept, new) = (read(kept), read(new));
    let mut fields: Vec<String> = kept.keys().chain(new.keys()).cloned().collect();
    fields.sort_unstable();
    fields.dedup();
    fields.retain(|field| kept.get(field) != new.get(field));
    fields
}

impl PatchVolume {
    /// Reads a body.
    ///
    /// # Errors
    /// 400 or 422, naming the field.
    pub fn parse(bytes: &[u8]) -> Result<PatchVolume, Problem> {
        let mut fields = Fields::new(parse_body(bytes)?);
        let off = fields.map.get("qos").is_some_and(Value::is_null);
        let qos = fields.qos()?;
        let patch = PatchVolume {
            size_bytes: fields.number("size", true)?,
            qos: if off { Some(None) } else { qos.map(Some) },
            labels: fields.labels()?,
            if_generation: fields.number("if_generation", false)?,
        };
        fields.finish()?;
        Ok(patch)
    }
}

impl CreateSnapshot {
    /// Reads a body.
    ///
    /// # Errors
    /// 400 or 422, naming the field.
    pub fn parse(bytes: &[u8]) -> Result<CreateSnapshot, Problem> {
        let mut fields = Fields::new(parse_body(bytes)?);
        let (name, volume) = (fields.name("name")?, fields.name("volume")?);
        let labels = fields.labels()?.unwrap_or_default();
        let snapshot = CreateSnapshot {
            name: fields.needed("name", name)?,
            volume: fields.needed("volume", volume)?,
            labels,
        };
        fields.finish()?;
        Ok(snapshot)
    }
}

impl Restore {
    /// Reads a body.
    ///
    /// # Errors
    /// 400 or 422, naming the field.
    pub fn parse(bytes: &[u8]) -> Result<Restore, Problem> {
        let mut fields = Fields::new(parse_body(bytes)?);
        let name = fields.name("name")?;
        fields.finish()?;
        Ok(Restore { name })
    }
}
