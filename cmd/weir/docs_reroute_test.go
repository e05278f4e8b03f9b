// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/weir-project/weir/host"
	"github.com/weir-project/weir/internal/nstest"
)

// The quick start of docs/REROUTE.md works as written: packets go on after the cut.
func TestDocsReroute(t *testing.T) {
	nstest.NeedRoot(t)
	for _, tool := range []string{"go", "ip", "ping"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("need: tool %s (ping: Debian package iputils-ping)", tool)
		}
	}
	text, err := os.ReadFile("../../docs/REROUTE.md")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if out, err := exec.Command("go", "build", "-o", dir, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	// The page writes a key beside the example.
	if err := os.CopyFS(filepath.Join(dir, "examples/reroute"), os.DirFS("../../examples/reroute")); err != nil {
		t.Fatal(err)
	}
	nstest.Enter(t)
	sh := startShell(t, dir, dir)
	rerouted := false
	for _, s := range shellOf(string(text)) {
		if s.file != "" {
			continue // a real router's configuration, checked below
		}
		if s.text == "weir reroute status" {
			s.text += " | awk '$1 == \"a-to-b\" && $4 == \"not\" && $6 > 0 {print \"rerouted\"}'"
			s.prints = "rerouted"
			rerouted = true
		}
		if err := sh.run(s); err != nil {
			t.Fatalf("docs/REROUTE.md:%d: %s\n%v", s.line, s.text, err)
		}
	}
	if !rerouted {
		t.Error("the quick start does not show the status")
	}
}

// completeConfiguration matches a yaml block with a first line "# weir.yaml", also within a list.
var completeConfiguration = regexp.MustCompile("(?s)```yaml\n *# weir\\.yaml\n(.*?)```")

// The complete configurations of these pages are valid.
func TestDocsRerouteConfigurations(t *testing.T) {
	files := []string{"../../examples/reroute/weir.yaml"}
	dir := t.TempDir()
	for _, page := range []string{"REROUTE.md", "BFD.md", "coming-from/bfdd-and-bird.md"} {
		text, err := os.ReadFile("../../docs/" + page)
		if err != nil {
			t.Fatal(err)
		}
		for i, block := range completeConfiguration.FindAllStringSubmatch(string(text), -1) {
			name := filepath.Join(dir, fmt.Sprintf("%s-%d.yaml", filepath.Base(page), i+1))
			if err := os.WriteFile(name, []byte(block[1]), 0o600); err != nil {
				t.Fatal(err)
			}
			files = append(files, name)
		}
	}
	if len(files) < 6 {
		t.Errorf("only %d configurations were found", len(files))
	}
	for _, f := range files {
		if _, err := host.LoadConfig(f); err != nil {
			t.Error(err)
		}
	}
}
