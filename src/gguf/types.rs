/// The type of a key's value (`enum gguf_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the format's own")]
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    /// All types, by their number in a file.
    const ALL: [ValueType; 13] = {
        use ValueType::*;
        [
            U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64,
        ]
    };

    /// The type with this number in a file.
    pub fn from_raw(raw: u32) -> Option<ValueType> {
        Self::ALL.get(usize::try_from(raw).ok()?).copied()
    }

    /// Its number in a file.
    pub fn raw(self) -> u32 {
        self as u32
    }

    /// The type that [`ValueType::name`] calls so.
    pub fn from_name(name: &str) -> Option<ValueType> {
        Self::ALL.into_iter().find(|ty| ty.name() == name)
    }

    /// Bytes of one value; `None` for strings and arrays.
    pub fn size(self) -> Option<u64> {
        use ValueType::*;
        match self {
            U8 | I8 | Bool => Some(1),
            U16 | I16 => Some(2),
            U32 | I32 | F32 => Some(4),
            U64 | I64 | F64 => Some(8),
            String | Array => None,
        }
    }

    /// The type's name as `inspect` prints it.
    pub fn name(self) -> &'static str {
        use ValueType::*;
        match self {
            U8 => "u8",
            I8 => "i8",
            U16 => "u16",
            I16 => "i16",
            U32 => "u32",
            I32 => "i32",
            F32 => "f32",
            Bool => "bool",
            String => "str",
            Array => "arr",
            U64 => "u64",
            I64 => "i64",
            F64 => "f64",
        }
    }
}

/// A ggml tensor type by its number; unknown and private numbers are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GgmlType(pub u32);

/// (number, name, values per block, bytes per block), from `ggml.h`, `ggml.c` and `ggml-common.h`.
const TYPES: &[(u32, &str, u64, u64)] = &[
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 36),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
    (42, "Q2_0", 64, 18),
];

impl GgmlType {
    /// 32-bit floats.
    pub const F32: GgmlType = GgmlType(0);
    /// 16-bit floats.
    pub const F16: GgmlType = GgmlType(1);
    /// Blocks of 8-bit integers.
    pub const Q8_0: GgmlType = GgmlType(8);
    /// 32-bit integers.
    pub const I32: GgmlType = GgmlType(26);
    /// 64-bit integers.
    pub const I64: GgmlType = GgmlType(27);
    /// 16-bit brain floats.
    pub const BF16: GgmlType = GgmlType(30);

    /// The type of a name, in any case.
    pub fn from_name(name: &str) -> Option<GgmlType> {
        let found = TYPES.iter().find(|t| t.1.eq_ignore_ascii_case(name))?;
        Some(GgmlType(found.0))
    }

    fn entry(self) -> Option<&'static (u32, &'static str, u64, u64)> {
        TYPES.iter().find(|t| t.0 == self.0)
    }

    /// (values, bytes) of a block; `None` for a type that llama.cpp b11434 does not know.
    pub fn block(self) -> Option<(u64, u64)> {
        self.entry().map(|t| (t.2, t.3))
    }

    /// The type's name, or `type-N`.
    pub fn name(self) -> String {
        self.entry()
            .map_or_else(|| format!("type-{}", self.0), |t| t.1.to_owned())
    }
}
