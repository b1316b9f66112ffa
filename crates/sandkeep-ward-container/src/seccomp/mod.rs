//! The seccomp filter of a box: compiled once, installed in every box.

mod list;

use crate::failure::{Doing, Failure};
use list::{Answer, Entry, Test};
use sandkeep_model::{Error, Result};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, sock_filter,
};
use sha2::{Digest as _, Sha256};
use std::{collections::BTreeMap, io};

#[cfg(target_arch = "x86_64")]
const ARCH: TargetArch = TargetArch::x86_64;
#[cfg(target_arch = "aarch64")]
const ARCH: TargetArch = TargetArch::aarch64;

/// A system call that boxes do not get, or not with every argument, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefusedCall {
    /// `SYS_mount`
    pub name: &'static str,
    /// Only with certain arguments.
    pub sometimes: bool,
    pub why: &'static str,
}

/// The list, for people: what `doctor` and the documentation show.
pub fn refused_calls() -> Vec<RefusedCall> {
    list::entries()
        .into_iter()
        .map(|entry| RefusedCall {
            name: entry.name,
            sometimes: !entry.when.is_empty(),
            why: entry.why,
        })
        .collect()
}

/// The programs to install, in this order.
pub struct Filters {
    programs: Vec<BpfProgram>,
}

impl std::fmt::Debug for Filters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list()
            .entries(self.programs.iter().map(Vec::len))
            .finish()
    }
}

impl Filters {
    pub fn compile() -> Result<Self> {
        let mut by_answer: BTreeMap<Answer, Vec<Entry>> = BTreeMap::new();
        for entry in list::entries() {
            by_answer.entry(entry.answer).or_default().push(entry);
        }
        let mut programs = vec![other_abis()];
        for (answer, entries) in by_answer {
            programs.push(
                program(answer, &entries)
                    .map_err(|error| Error::internal(format!("the seccomp list: {error}")))?,
            );
        }
        Ok(Self { programs })
    }

    pub fn count(&self) -> usize {
        self.programs.len()
    }

    /// As the kernel gives them back, in the order in which they are installed.
    pub fn bytes(&self) -> Vec<Vec<u8>> {
        let instruction = |one: &sock_filter| {
            let mut bytes = one.code.to_ne_bytes().to_vec();
            bytes.extend([one.jt, one.jf]);
            bytes.extend(one.k.to_ne_bytes());
            bytes
        };
        self.programs
            .iter()
            .map(|program| program.iter().flat_map(instruction).collect())
            .collect()
    }

    /// A short name of this very list.
    pub fn name(&self) -> String {
        let digest = self
            .bytes()
            .iter()
            .fold(Sha256::new(), |digest, program| {
                digest.chain_update(program)
            })
            .finalize();
        digest[..4]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }

    /// Installs all of them in this thread. It needs CAP_SYS_ADMIN in the own user namespace:
    /// `no_new_privs` stays off, because sudo must work in a box.
    pub fn install(&self) -> Result<(), Failure> {
        for program in &self.programs {
            install(program).doing("installing the seccomp filter")?;
        }
        Ok(())
    }
}

fn action(answer: Answer) -> SeccompAction {
    let errno = match answer {
        Answer::NotPermitted => libc::EPERM,
        Answer::NoSuchCall => libc::ENOSYS,
        Answer::NoSuchFamily => libc::EAFNOSUPPORT,
        Answer::Pretend => 0,
    };
    SeccompAction::Errno(errno.cast_unsigned())
}

fn program(answer: Answer, entries: &[Entry]) -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for entry in entries {
        let of_call = rules.entry(entry.call).or_default();
        // No rule at all means always.
        if !entry.when.is_empty() {
            let conditions = entry
                .when
                .iter()
                .map(condition)
                .collect::<Result<Vec<_>, _>>()?;
            of_call.push(SeccompRule::new(conditions)?);
        }
    }
    // A call of another architecture (32-bit programs) kills the process: seccompiler puts
    // that test first.
    SeccompFilter::new(rules, SeccompAction::Allow, action(answer), ARCH)?.try_into()
}

fn condition(test: &Test) -> Result<SeccompCondition, seccompiler::BackendError> {
    let (argument, length, operation, value) = match *test {
        Test::Is(argument, value) => (
            argument,
            SeccompCmpArgLen::Dword,
            SeccompCmpOp::Eq,
            u64::from(value),
        ),
        Test::IsNot(argument, value) => (
            argument,
            SeccompCmpArgLen::Dword,
            SeccompCmpOp::Ne,
            u64::from(value),
        ),
        Test::Bits(argument, mask, value) => (
            argument,
            SeccompCmpArgLen::Dword,
            SeccompCmpOp::MaskedEq(u64::from(mask)),
            u64::from(value),
        ),
        Test::Given(argument) => (argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, 0),
    };
    SeccompCondition::new(argument, length, operation, value)
}

/// Refuses the x32 numbers: the same architecture to the filter, but other call numbers, so
/// the list would not see them.
fn other_abis() -> BpfProgram {
    const X32_BIT: u32 = 0x4000_0000;
    const LOAD_WORD: u16 = 0x20;
    const JUMP_IF_GREATER_OR_EQUAL: u16 = 0x35;
    const RETURN: u16 = 0x06;
    let statement = |code, k| sock_filter {
        code,
        jt: 0,
        jf: 0,
        k,
    };
    vec![
        // The number is the first word of `struct seccomp_data`.
        statement(LOAD_WORD, 0),
        sock_filter {
            code: JUMP_IF_GREATER_OR_EQUAL,
            jt: 0,
            jf: 1,
            k: X32_BIT,
        },
        statement(
            RETURN,
            libc::SECCOMP_RET_ERRNO | libc::ENOSYS.cast_unsigned(),
        ),
        statement(RETURN, libc::SECCOMP_RET_ALLOW),
    ]
}

fn install(program: &BpfProgram) -> io::Result<()> {
    #[repr(C)]
    struct SockFprog {
        len: u16,
        filter: *const sock_filter,
    }
    let fprog = SockFprog {
        len: u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
        filter: program.as_ptr(),
    };
    // SAFETY: `fprog` and the program it points to live until the call returns; the kernel
    // copies them.
    let done = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            0,
            &raw const fprog,
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_compiles_to_one_program_per_answer() {
        let filters = Filters::compile().unwrap();
        assert_eq!(filters.programs.len(), 5);
        for program in &filters.programs {
            assert!(program.len() < 4096, "the kernel's bound");
        }
    }
}
