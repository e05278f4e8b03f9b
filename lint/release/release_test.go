// SPDX-License-Identifier: Apache-2.0

// Package release tests the script release/release in a small repository with stubs of the long steps.
package release

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// repository is a checkout ready for the release of 0.1.0.
type repository struct {
	t   *testing.T
	dir string
}

// stubs are the programs called by the steps. A file failing-STEP in the parent directory lets a step fail.
var stubs = map[string]string{
	"bootstrap":     `[ "$1" = --install ] || for a in "$@"; do [ ! -e "../failing-$a" ] || exit 1; done`,
	"release/build": `mkdir -p "$2" && echo "weir $1" >"$2/weir.deb"; [ ! -e ../failing-packages ] || echo "$2" >>"$2/weir.deb"`,
	"release/test":  `[ ! -e ../failing-package-test ] && [ -e "$1/weir.deb" ]`,
	"bin/weir-lab":  `case $* in *--names) echo steer ;; esac; [ ! -e "../failing-$1" ]`,
	"bin/testlog":   `cat`,
}

func newRepository(t *testing.T) repository {
	t.Helper()
	for _, tool := range []string{"git", "bash"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip("need: tool", tool)
		}
	}
	r := repository{t, filepath.Join(t.TempDir(), "weir")}
	for name, text := range stubs {
		r.write(name, "#!/usr/bin/env bash\nset -e\n"+text+"\n")
	}
	r.write("../path/sudo", "#!/bin/sh\nexec \"$@\"\n")
	for _, name := range []string{"release/release", ".ci/steps.sh"} {
		text, err := os.ReadFile(filepath.Join("..", "..", name))
		if err != nil {
			t.Fatal(err)
		}
		r.write(name, string(text))
	}
	r.write(".gitignore", "/dist/\n/bin/\n")
	r.write("docs/KERNELS.md", "all tested\n")
	r.write("CHANGELOG.md", "# Changelog\n\n## Unreleased\n\n## 0.1.0 - 2026-12-01\n\n### Added\n\n- `weir apply`: applies.\n\n## 0.0.9 - 2026-11-01\n\n### Fixed\n\n- old.\n")
	r.write("host/testdata/0.1.0/pins.json", "[]\n")
	r.write("feature/handoff/wire/testdata/0.1.0/messages.json", "[]\n")
	r.git("init", "--quiet", "--initial-branch", "main")
	r.commit()
	return r
}

func (r repository) write(name, text string) {
	r.t.Helper()
	path := filepath.Join(r.dir, name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), fs.FileMode(0o755))); err != nil {
		r.t.Fatal(err)
	}
}

func (r repository) git(args ...string) string {
	r.t.Helper()
	out, err := r.run(append([]string{"git", "-c", "user.name=t", "-c", "user.email=t@example.org"}, args...)...)
	if err != nil {
		r.t.Fatalf("git %q: %v: %s", args, err, out)
	}
	return out
}

func (r repository) commit() {
	r.t.Helper()
	r.git("add", "--all")
	r.git("commit", "--quiet", "--message", "all: change")
}

// run runs a command in the repository, without git's configuration of this machine.
func (r repository) run(args ...string) (string, error) {
	r.t.Helper()
	c := exec.Command(args[0], args[1:]...)
	c.Dir = r.dir
	c.Env = append(os.Environ(), "PATH="+filepath.Join(r.dir, "..", "path")+":"+os.Getenv("PATH"), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null",
		"GIT_AUTHOR_NAME=t", "GIT_AUTHOR_EMAIL=t@example.org", "GIT_COMMITTER_NAME=t", "GIT_COMMITTER_EMAIL=t@example.org")
	out, err := c.CombinedOutput()
	return string(out), err
}

// refuses checks that the script fails, with a reason and a remedy, and leaves no tag.
func (r repository) refuses(want string, args ...string) {
	r.t.Helper()
	before := r.git("tag")
	out, err := r.run(append([]string{"env", "TAG=yes", "release/release"}, args...)...)
	if err == nil || !strings.Contains(out, want) || !strings.Contains(out, "release: refused") {
		r.t.Errorf("%v, want %q in\n%s", err, want, out)
	}
	if now := r.git("tag"); now != before {
		r.t.Errorf("refused, and the tags are %q", now)
	}
}

// The script refuses each state of the checkout that is no release.
func TestRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		change func(r repository)
		want   string
	}{
		"changes":          {func(r repository) { r.write("new", "") }, "the checkout has changes: commit or remove them"},
		"branch":           {func(r repository) { r.git("switch", "--quiet", "--create", "other") }, "HEAD is other, not main"},
		"detached":         {func(r repository) { r.git("switch", "--quiet", "--detach") }, "HEAD is no branch, not main"},
		"tag":              {func(r repository) { r.git("tag", "v0.1.0") }, "tag v0.1.0 exists: a version is released once"},
		"changelog":        {func(r repository) { r.write("CHANGELOG.md", "## Unreleased\n"); r.commit() }, "CHANGELOG.md has no entries for 0.1.0: rename Unreleased"},
		"empty section":    {func(r repository) { r.write("CHANGELOG.md", "## Unreleased\n\n## 0.1.0 - 2026-12-01\n"); r.commit() }, "CHANGELOG.md has no entries for 0.1.0"},
		"unreleased":       {func(r repository) { r.edit("CHANGELOG.md", "## Unreleased\n", "## Unreleased\n\n- more\n") }, "CHANGELOG.md has unreleased entries: move them to 0.1.0"},
		"no date":          {func(r repository) { r.edit("CHANGELOG.md", "0.1.0 - 2026-12-01", "0.1.0") }, "heading 0.1.0: write ## VERSION - YYYY-MM-DD"},
		"heading":          {func(r repository) { r.edit("CHANGELOG.md", "### Added", "### New") }, "heading New: use Added, Changed, Fixed and Removed"},
		"missing fixture":  {func(r repository) { r.git("mv", "host/testdata/0.1.0", "host/testdata/0.0.9"); r.commit() }, "host/testdata/0.1.0 is missing: pins, files or messages of 0.1.0 would have no fixture: write and commit it: make release-fixtures VERSION=0.1.0"},
		"changed fixture":  {func(r repository) { r.release("0.0.9"); r.edit("host/testdata/0.0.9/pins.json", "[]", "[1]") }, "host/testdata/0.0.9 differs from tag v0.0.9: a released fixture never changes"},
		"lost section":     {func(r repository) { r.git("tag", "v0.0.8") }, "CHANGELOG.md has no section 0.0.8 of tag v0.0.8"},
		"no fixtures":      {func(r repository) { r.git("rm", "-r", "--quiet", "host", "feature"); r.commit() }, "there are no fixtures: write them"},
		"failed lint":      {func(r repository) { r.write("../failing-lint", "") }, "FAIL: lint"},
		"failed generated": {func(r repository) { r.write("../failing-check-generated", "") }, "FAIL: generated"},
		"failed tests":     {func(r repository) { r.write("../failing-test", "") }, "FAIL: test"},
		"failed race":      {func(r repository) { r.write("../failing-test-race", "") }, "FAIL: race"},
		"failed lab":       {func(r repository) { r.write("../failing-run", "") }, "FAIL: lab steer"},
		"failed demo":      {func(r repository) { r.write("../failing-demo", "") }, "FAIL: demonstrations"},
		"failed docs":      {func(r repository) { r.write("../failing-docs-test", "") }, "FAIL: docs"},
		"untested kernel":  {func(r repository) { r.write("../failing-KERNELFLAGS=-complete", "") }, "FAIL: kernels"},
		"different builds": {func(r repository) { r.write("../failing-packages", "") }, "FAIL: packages"},
		"failed package":   {func(r repository) { r.write("../failing-package-test", "") }, "FAIL: package test"},
		"written file":     {func(r repository) { r.edit("release/test", "set -e", "set -e; touch left") }, "FAIL: unchanged"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRepository(t)
			c.change(r)
			r.refuses(c.want, "0.1.0")
		})
	}
	r := newRepository(t)
	for _, version := range []string{"", "1", "main", "0.1.0-dirty!"} {
		r.refuses("give a semantic version: make release VERSION=0.1.0", version)
	}
}

// edit replaces a text of a file and commits it.
func (r repository) edit(name, old, text string) {
	r.t.Helper()
	b, err := os.ReadFile(filepath.Join(r.dir, name))
	if err != nil || !strings.Contains(string(b), old) {
		r.t.Fatal(name, err)
	}
	r.write(name, strings.Replace(string(b), old, text, 1))
	r.commit()
}

// release tags a version with fixtures.
func (r repository) release(version string) {
	r.t.Helper()
	r.write("host/testdata/"+version+"/pins.json", "[]\n")
	r.commit()
	r.git("tag", "v"+version)
}

// A complete release leaves dist/ with notes. Only TAG=yes tags the commit.
func TestRelease(t *testing.T) {
	r := newRepository(t)
	out, err := r.run("release/release", "0.1.0")
	if err != nil || !strings.Contains(out, "git tag --annotate v0.1.0") || r.git("tag") != "" {
		t.Fatalf("%v, tags %q\n%s", err, r.git("tag"), out)
	}
	for _, step := range []string{"install", "build", "lint", "generated", "test", "race", "lab steer", "demo steer", "docs", "kernels", "packages", "package test", "all steps"} {
		if !strings.Contains(out, "\n"+step) {
			t.Errorf("no time of %q in\n%s", step, out)
		}
	}
	notes, err := os.ReadFile(filepath.Join(r.dir, "dist", "RELEASE-NOTES.md"))
	if want := "### Added\n\n- `weir apply`: applies.\n\n"; err != nil || string(notes) != want {
		t.Errorf("notes %q, %v, want %q", notes, err, want)
	}
	if page, err := os.ReadFile(filepath.Join(r.dir, "dist", "KERNELS.md")); err != nil || len(page) == 0 {
		t.Error(err)
	}
	if out, err := r.run("env", "TAG=yes", "release/release", "v0.1.0"); err != nil || r.git("cat-file", "-t", "v0.1.0") != "tag\n" {
		t.Fatalf("%v\n%s", err, out)
	}
	r.refuses("tag v0.1.0 exists", "0.1.0")
}

// The check passes for a complete release, and without a version between two releases.
func TestCheck(t *testing.T) {
	r := newRepository(t)
	for _, args := range [][]string{{"0.1.0"}, {""}, nil} {
		if out, err := r.run(append([]string{"release/release", "--check"}, args...)...); err != nil {
			t.Errorf("%q: %v\n%s", args, err, out)
		}
	}
	r.edit("CHANGELOG.md", "## Unreleased\n", "## Unreleased\n\n### Added\n\n- more\n")
	r.write("new", "")
	if out, err := r.run("release/release", "--check"); err != nil {
		t.Errorf("between two releases: %v\n%s", err, out)
	}
	r.refuses("CHANGELOG.md has unreleased entries", "--check", "0.1.0")
}
