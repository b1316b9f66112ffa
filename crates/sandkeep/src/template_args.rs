//! The words of `template`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use sandkeep_model::TemplateName;

use crate::args::Place;

const BUILD_EXAMPLES: &str = "\
A recipe:
  from = \"base\"
  isolation = [\"gvisor\"]             # levels to warm it for; steps run at the first
  network = \"package-registries\"     # what the steps may reach; nothing when left out
  start = \"python3 -m http.server 8000\"
  ready = { port = 8000 }              # or { command = \"...\", timeout_seconds = 60 }
  [limits]
  memory_mib = 512
  [[steps]]
  run = \"apt-get update && apt-get install -y jq\"
  user = \"root\"
  [[steps]]
  copy = \"app\"                       # from the directory of the recipe
  to = \"/home/user/app\"
  [[steps]]
  env = { MODE = \"production\" }
  [[steps]]
  workdir = \"/home/user/app\"";

#[derive(Debug, Args)]
pub struct BuildArgs {
    pub name: TemplateName,
    /// The recipe
    #[arg(short, long, value_name = "RECIPE.toml")]
    pub file: PathBuf,
    /// Where the files of copy steps are [default: where the recipe is]
    #[arg(long, value_name = "DIR")]
    pub context: Option<PathBuf>,
    /// Run every step, whatever earlier builds left
    #[arg(long)]
    pub no_cache: bool,
    /// Print the id of the build and leave it to the server
    #[arg(short, long)]
    pub detach: bool,
    #[command(flatten)]
    pub place: Place,
}

#[derive(Debug, Subcommand)]
pub enum TemplateCommand {
    /// Make a template from a recipe, or make it anew; the old one is there until then
    #[command(after_help = BUILD_EXAMPLES)]
    Build(BuildArgs),
    /// What a template is made of, what it starts, and where it is warm
    Inspect {
        name: TemplateName,
        #[command(flatten)]
        place: Place,
    },
    /// What the build of a template said, or says
    Logs {
        name: TemplateName,
        #[command(flatten)]
        place: Place,
    },
    /// End the build of a template that runs
    Cancel {
        name: TemplateName,
        #[command(flatten)]
        place: Place,
    },
    /// Make a template from a tar archive of a root file system
    Import {
        name: TemplateName,
        /// A .tar, .tar.gz or .tar.zst file; - for standard input
        file: PathBuf,
        #[command(flatten)]
        place: Place,
    },
    /// Remove templates; sandboxes made from them live on
    Rm {
        #[arg(required = true, value_name = "NAME")]
        names: Vec<TemplateName>,
        #[command(flatten)]
        place: Place,
    },
    /// List the templates
    Ls {
        #[command(flatten)]
        place: Place,
    },
}
