//! What a view's metadata says otherwise than its source: keys set and removed.

use serde_json::Value as Json;

use super::plan::is_split_key;
use crate::gguf::{Header, Value, ValueType};

const ARCHITECTURE: &[u8] = b"general.architecture";
/// What llama.cpp reads of every tokenizer that has it.
const TOKENIZER: [&[u8]; 6] = [
    b"tokenizer.ggml.model",
    b"tokenizer.ggml.pre",
    b"tokenizer.ggml.tokens",
    b"tokenizer.ggml.token_type",
    b"tokenizer.ggml.scores",
    b"tokenizer.ggml.merges",
];
const TYPES: &str =
    "int, float, bool, str, u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, arr[TYPE]";

/// A value as it is given.
#[derive(Debug, Clone, PartialEq)]
pub enum Setting {
    /// An integer in the type of the key it replaces; of a new key in u32, i32, u64 or i64, the first that holds it.
    Int(i128),
    /// A floating-point number in the type of the key it replaces, else f32.
    Float(f64),
    /// A value whose type is given.
    Typed(Value),
}

/// Keys to set and to remove, each at most once, in the order given.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Overlay {
    changes: Vec<(Vec<u8>, Option<Setting>)>,
}

/// Why an overlay is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OverlayError {
    /// Text that is no override.
    #[error("{text:?} is no override: {why}")]
    Syntax {
        /// What was given.
        text: String,
        /// What is wrong with it.
        why: String,
    },
    /// A change that makes no sense, by itself or for this model.
    #[error("{key}: {why}")]
    Key {
        /// The key.
        key: String,
        /// Why not.
        why: String,
    },
}

fn refused(key: &[u8], why: impl Into<String>) -> OverlayError {
    OverlayError::Key {
        key: String::from_utf8_lossy(key).into_owned(),
        why: why.into(),
    }
}

/// `KEY=TYPE:VALUE`, or several with commas between them, as llama.cpp's `--override-kv` takes them: a whole override
/// in double quotes may hold commas, and `""` there is a quote. The commas of an array are its own.
///
/// # Errors
/// `Syntax`.
pub fn parse_overrides(list: &str) -> Result<Vec<(Vec<u8>, Setting)>, OverlayError> {
    let mut rest = list;
    let mut found = Vec::new();
    loop {
        let (item, end) = match rest.strip_prefix('"') {
            Some(quoted) => unquote(quoted),
            None => (
                String::new(),
                array_end(rest)
                    .or_else(|| rest.find(','))
                    .unwrap_or(rest.len()),
            ),
        };
        let plain = rest.get(..end).unwrap_or_default();
        found.push(parse_override(if item.is_empty() { plain } else { &item })?);
        rest = rest.get(end..).unwrap_or_default();
        match rest.strip_prefix(',') {
            Some(more) => rest = more,
            None if rest.is_empty() => return Ok(found),
            None => {
                return Err(OverlayError::Syntax {
                    text: rest.to_owned(),
                    why: "a comma was expected before it".to_owned(),
                });
            }
        }
    }
}

/// The text up to the closing quote, and how much of the list that is, the opening quote counted.
fn unquote(quoted: &str) -> (String, usize) {
    let mut item = String::new();
    let mut chars = quoted.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        if c != '"' {
            item.push(c);
        } else if chars.next_if(|&(_, next)| next == '"').is_some() {
            item.push('"');
        } else {
            return (item, at.saturating_add(2));
        }
    }
    (item, quoted.len().saturating_add(1))
}

/// Where an override ends whose value is an array.
fn array_end(list: &str) -> Option<usize> {
    let (key, value) = list.split_once('=')?;
    let (ty, json) = value.split_once(':')?;
    if !ty.starts_with("arr[") || key.contains(',') {
        return None;
    }
    let mut values = serde_json::Deserializer::from_str(json).into_iter::<Json>();
    values.next()?.ok()?;
    let before = list.len().checked_sub(json.len())?;
    before.checked_add(values.byte_offset())
}

fn parse_override(text: &str) -> Result<(Vec<u8>, Setting), OverlayError> {
    let bad = |why: &str| OverlayError::Syntax {
        text: text.to_owned(),
        why: why.to_owned(),
    };
    let (key, typed) = text
        .split_once('=')
        .filter(|(key, _)| !key.is_empty())
        .ok_or_else(|| bad("KEY=TYPE:VALUE is"))?;
    let (ty, value) = typed
        .split_once(':')
        .ok_or_else(|| bad("KEY=TYPE:VALUE is"))?;
    let setting = match ty {
        "int" => value.parse().ok().map(Setting::Int),
        "float" => value.parse().ok().map(Setting::Float),
        _ if ty.starts_with("arr[") => serde_json::from_str(value)
            .ok()
            .and_then(|json| Setting::of_type(ty, &json)),
        _ => {
            let ty = named(ty).ok_or_else(|| bad(&format!("the types are {TYPES}")))?;
            scalar(ty, value).map(Setting::Typed)
        }
    };
    let setting = setting.ok_or_else(|| bad(&format!("the value is no {ty}")))?;
    Ok((key.as_bytes().to_vec(), setting))
}

/// The scalar type of this name.
fn named(name: &str) -> Option<ValueType> {
    ValueType::from_name(name).filter(|&ty| ty != ValueType::Array)
}

fn scalar(ty: ValueType, text: &str) -> Option<Value> {
    match ty {
        ValueType::Bool => text.parse().ok().map(Value::bool),
        ValueType::String => Some(Value::string(text.as_bytes())),
        ValueType::F32 | ValueType::F64 => Value::float(ty, text.parse().ok()?),
        _ => Value::int(ty, text.parse().ok()?),
    }
}

impl Setting {
    /// A value without a type, as TOML has them. `None` for what is no integer, number, truth value or string.
    pub fn of_value(json: &Json) -> Option<Setting> {
        Some(match json {
            Json::Bool(value) => Setting::Typed(Value::bool(*value)),
            Json::String(text) => Setting::Typed(Value::string(text.as_bytes())),
            Json::Number(_) => match int(json) {
                Some(value) => Setting::Int(value),
                None => Setting::Float(json.as_f64()?),
            },
            Json::Null | Json::Array(_) | Json::Object(_) => return None,
        })
    }

    /// A value of the type of this name. `None` for an unknown type or a value that is not of it.
    pub fn of_type(ty: &str, json: &Json) -> Option<Setting> {
        match ty {
            "int" => return int(json).map(Setting::Int),
            "float" => return json.as_f64().map(Setting::Float),
            _ => {}
        }
        let value = match ty.strip_prefix("arr[") {
            Some(of) => {
                let element = named(of.strip_suffix(']')?)?;
                let values = json.as_array()?.iter().map(|v| of_json(element, v));
                Value::array(element, &values.collect::<Option<Vec<_>>>()?)
            }
            None => of_json(named(ty)?, json),
        };
        value.map(Setting::Typed)
    }

    /// The value for a key that has type `old` now.
    fn resolve(&self, old: Option<ValueType>) -> Result<Value, String> {
        use ValueType::*;
        match (self, old) {
            (Setting::Typed(value), _) => Ok(value.clone()),
            (Setting::Int(value), None) => [U32, I32, U64, I64]
                .into_iter()
                .find_map(|ty| Value::int(ty, *value))
                .ok_or_else(|| format!("no integer type holds {value}")),
            (Setting::Float(value), None) => Value::float(F32, *value)
                .ok_or_else(|| format!("f32 does not hold {value}; give it as f64")),
            (Setting::Int(value), Some(ty)) => Value::int(ty, *value).ok_or_else(|| {
                let ty = ty.name();
                format!(
                    "it is {ty}, which does not hold the integer {value}; name a type to change it"
                )
            }),
            (Setting::Float(value), Some(ty)) => Value::float(ty, *value).ok_or_else(|| {
                let ty = ty.name();
                format!(
                    "it is {ty}, which does not hold the number {value}; name a type to change it"
                )
            }),
        }
    }
}

fn int(json: &Json) -> Option<i128> {
    json.as_i64()
        .map(i128::from)
        .or_else(|| json.as_u64().map(i128::from))
}

fn of_json(ty: ValueType, json: &Json) -> Option<Value> {
    match ty {
        ValueType::Bool => json.as_bool().map(Value::bool),
        ValueType::String => json.as_str().map(|text| Value::string(text.as_bytes())),
        ValueType::F32 | ValueType::F64 => Value::float(ty, json.as_f64()?),
        _ => Value::int(ty, int(json)?),
    }
}

impl Overlay {
    /// True when nothing is changed.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// Sets a key.
    ///
    /// # Errors
    /// `Key` for one that is changed already, or that the view itself decides.
    pub fn set(&mut self, key: &[u8], value: Setting) -> Result<(), OverlayError> {
        self.change(key, Some(value))
    }

    /// Removes a key.
    ///
    /// # Errors
    /// As [`Overlay::set`].
    pub fn remove(&mut self, key: &[u8]) -> Result<(), OverlayError> {
        self.change(key, None)
    }

    fn change(&mut self, key: &[u8], value: Option<Setting>) -> Result<(), OverlayError> {
        if key.is_empty() {
            return Err(refused(key, "a key without a name"));
        }
        if is_split_key(key) {
            return Err(refused(
                key,
                "the view decides this key itself (clean headers leave it out)",
            ));
        }
        if self.changes.iter().any(|(other, _)| other == key) {
            return Err(refused(key, "changed twice"));
        }
        self.changes.push((key.to_vec(), value));
        Ok(())
    }

    /// These changes, and those of `below` for keys that are not among them.
    pub fn over(self, below: Overlay) -> Overlay {
        let mut changes = below.changes;
        changes.retain(|(key, _)| self.changes.iter().all(|(other, _)| other != key));
        changes.extend(self.changes);
        Overlay { changes }
    }

    /// Applies the changes to a model's metadata, which stands in its first header. Returns what may not have been
    /// meant, a sentence each.
    ///
    /// # Errors
    /// `Key` for a change that no loader could follow.
    pub fn apply(&self, headers: &mut [Header]) -> Result<Vec<String>, OverlayError> {
        let mut warnings = Vec::new();
        let Some((first, _)) = headers.split_first_mut() else {
            return Ok(warnings);
        };
        let mut header = first.clone();
        for (key, setting) in &self.changes {
            let shown = String::from_utf8_lossy(key);
            let old = header.get(key).map(|kv| kv.ty);
            let value = match setting {
                Some(setting) => Some(setting.resolve(old).map_err(|why| refused(key, why))?),
                None if old.is_none() => {
                    return Err(refused(key, "there is no such key to remove"));
                }
                None if key == ARCHITECTURE => {
                    return Err(refused(key, "nothing loads a model without it"));
                }
                None => None,
            };
            match (&value, old) {
                (Some(value), Some(old)) if value.ty() != old => warnings.push(format!(
                    "{shown}: was {}, is {} now; a loader may expect the former",
                    old.name(),
                    value.ty().name()
                )),
                (None, _) if is_needed(first, key) => warnings.push(format!(
                    "{shown}: removed; llama.cpp may refuse or misread the model without it"
                )),
                _ => {}
            }
            header = header
                .with_key(key, value.as_ref())
                .map_err(|problem| refused(key, problem.to_string()))?;
        }
        if let (Some(was), Some(now)) = (architecture(first), architecture(&header))
            && was != now
            && !has_prefix(&header, now)
        {
            warnings.push(format!(
                "general.architecture: {} now, but no key begins with that name",
                String::from_utf8_lossy(now)
            ));
        }
        *first = header;
        Ok(warnings)
    }
}

fn architecture(header: &Header) -> Option<&[u8]> {
    let (_, value) = header.get(ARCHITECTURE)?.value.split_at_checked(8)?;
    Some(value)
}

fn has_prefix(header: &Header, arch: &[u8]) -> bool {
    header.kvs().any(|kv| is_of(arch, kv.key))
}

/// Whether a key is one of the architecture's own: `llama.context_length` of `llama`.
fn is_of(arch: &[u8], key: &[u8]) -> bool {
    key.strip_prefix(arch)
        .is_some_and(|rest| rest.starts_with(b"."))
}

fn is_needed(header: &Header, key: &[u8]) -> bool {
    TOKENIZER.contains(&key) || architecture(header).is_some_and(|arch| is_of(arch, key))
}
