// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/examples"
	"github.com/weir-project/weir/host"
)

// Every example is a valid configuration with a description of one line. Each key of the file at the top has one.
func TestExamples(t *testing.T) {
	list, err := inProcess("examples")
	if err != nil {
		t.Fatal(err)
	}
	completions, _ := inProcess("__complete", "examples", "")
	keys := map[string]bool{}
	var names []string
	for _, e := range examples.All() {
		if slices.Contains(names, e.Name) {
			t.Errorf("two examples are named %s", e.Name)
		}
		names = append(names, e.Name)
		text, err := inProcess("examples", e.Name)
		if err != nil || text != e.Text {
			t.Errorf("weir examples %s: %v, %q", e.Name, err, text)
		}
		if _, err := host.ParseConfig("../../examples/"+e.Name+".yaml", []byte(text)); err != nil { // beside its list of devices
			t.Error(err)
		}
		for line := range strings.Lines(text) {
			key, _, _ := strings.Cut(line, ":")
			keys[key] = true
		}
		if about := e.About; len(about) < 20 || len(about) > 110 || !strings.HasSuffix(about, ".") || !strings.HasPrefix(text, "# "+about+"\n") {
			t.Errorf("%s begins with %q: want a comment of one line, a sentence", e.Name, about)
		}
		if !strings.Contains(list, e.Name+" ") || !strings.Contains(completions, e.Name+"\t") {
			t.Errorf("%s is missing from\n%s\n%s", e.Name, list, completions)
		}
	}
	for _, key := range (&host.Config{}).Keys() {
		if !keys[key] {
			t.Errorf("no example has the section %s", key)
		}
	}
	files, err := filepath.Glob("../../examples/handoff/*.yaml") // examples/reroute belongs to ring.sh
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if name := strings.TrimSuffix(filepath.Base(f), ".yaml"); !slices.Contains(names, name) {
			t.Errorf("%s is not among the examples", f)
		}
	}
}

// An example in a folder of its own parses, or the error names the missing file and its format.
func TestExampleAlone(t *testing.T) {
	for _, e := range examples.All() {
		_, err := host.ParseConfig(filepath.Join(t.TempDir(), "weir.yaml"), []byte(e.Text))
		if err != nil && (!strings.Contains(err.Error(), "routers: no such file") || !strings.Contains(err.Error(), `like "edge1 192.0.2.1 2001:db8::/64"`)) {
			t.Errorf("%s: %v", e.Name, err)
		}
	}
}

func TestUnknownExample(t *testing.T) {
	for name, want := range map[string]string{"telemtry": `did you mean "telemetry"?`, "xyz": "want one of "} {
		if _, err := inProcess("examples", name); !errors.Is(err, cli.ErrUsage) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", name, err, want)
		}
	}
}
