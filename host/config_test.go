// SPDX-License-Identifier: Apache-2.0

package host

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/filter"
	"github.com/weir-project/weir/feature/reroute"
	"github.com/weir-project/weir/feature/steer"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares with a file. The flag -update writes the file.
func golden(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s: got\n%s\nwant\n%s", file, got, want)
	}
}

func forFiles(t *testing.T, pattern string, f func(t *testing.T, path, name string, data []byte)) {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		t.Fatalf("%s: %v, %v", pattern, files, err)
	}
	for _, path := range files {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".yaml"), func(t *testing.T) {
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			f(t, path, filepath.Base(path), data)
		})
	}
}

// place matches the position at the start of every error about a file.
var place = regexp.MustCompile(`^[^\s:]+\.yaml:[1-9][0-9]*:[1-9][0-9]*: .`)

// Each file of testdata/errors has exactly the errors of its golden file, each with a position.
func TestConfigErrors(t *testing.T) {
	forFiles(t, "testdata/errors/*.yaml", func(t *testing.T, path, name string, data []byte) {
		_, err := ParseConfig(name, data)
		if err == nil {
			t.Fatal("no error")
		}
		for line := range strings.Lines(err.Error()) {
			if !place.MatchString(line) {
				t.Errorf("without a place: %s", line)
			}
		}
		golden(t, strings.TrimSuffix(path, ".yaml")+".golden", err.Error()+"\n")
	})
}

func TestGoodConfigs(t *testing.T) {
	forFiles(t, "testdata/good/*.yaml", func(t *testing.T, path, name string, data []byte) {
		c, err := ParseConfig(name, data)
		if err != nil {
			t.Fatal(err)
		}
		sc, _ := steer.Feature{}.Spec(c.Document())
		if err := errors.Join(sc.Validate()...); err != nil { // sets the defaults
			t.Error(err)
		}
		b, err := json.MarshalIndent(sc, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		golden(t, strings.TrimSuffix(path, ".yaml")+".golden", fmt.Sprintf("group %q\n%s\n", c.Group, b))
	})
}

func TestLoadConfig(t *testing.T) {
	c, err := LoadConfig("testdata/good/example.yaml")
	if err != nil || len(c.Services) != 1 || c.Services["telemetry"].Name != "telemetry" {
		t.Errorf("%+v, %v", c, err)
	}
	if _, err := LoadConfig("testdata/absent.yaml"); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "testdata/absent.yaml") {
		t.Errorf("a file that is not there: %v", err)
	}
	if _, err := LoadConfig("testdata/errors/same-slot.yaml"); err == nil || !strings.HasPrefix(err.Error(), "testdata/errors/same-slot.yaml:8:9: ") {
		t.Errorf("an error without the path that was given: %v", err)
	}
}

// Files are named relative to the configuration, because later readers have other working directories.
func TestFilesOfConfig(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "weir.yaml")
	if err := os.WriteFile(path, []byte(`
services:
  dns:
    listen: [udp 192.0.2.1:53]
    members: [{slot: 0, pidfile: run/a.pid}, {slot: 1, pidfile: /run/b.pid}]
    steer: {slots: 2, by: device, devices: routers.txt}
filter:
  - {name: edge, hook: tcx, interfaces: [eth0], lists: {bad: lists/bad.txt}, rules: [{match: ip.src in $bad, action: drop}]}
reroute:
  - name: core
    interface: eth1
    repairs: [{segments: ["fc00:3::e"], interface: eth2}]
    bfd: {peer: "fd00:12::2", key_file: bfd.key}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "routers.txt"), []byte("r1 192.0.2.9\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir)
	for _, name := range []string{path, "weir.yaml", "./weir.yaml"} {
		c, err := LoadConfig(name)
		if err != nil {
			t.Fatal(err)
		}
		s, _ := steer.Feature{}.Spec(c.Document())
		f, _ := filter.Feature{}.Spec(c.Document())
		r, _ := reroute.Feature{}.Spec(c.Document())
		dns := s.Services[0]
		got := []string{dns.Members[0].PIDFile, dns.Members[1].PIDFile, dns.Devices, f.Filters[0].Lists["bad"], r.Paths[0].BFD.KeyFile}
		want := []string{dir + "/run/a.pid", "/run/b.pid", dir + "/routers.txt", dir + "/lists/bad.txt", dir + "/bfd.key"}
		if !slices.Equal(got, want) {
			t.Errorf("%s names %q, want %q", name, got, want)
		}
	}
}

// For any text, a configuration either has errors with positions, or is valid with its defaults set.
func FuzzConfig(f *testing.F) {
	for _, pattern := range []string{"testdata/errors/*.yaml", "testdata/good/*.yaml"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			f.Fatal(err)
		}
		for _, path := range files {
			data, err := os.ReadFile(path)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(data)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := ParseConfig("f.yaml", data)
		if err != nil {
			if !place.MatchString(err.Error()) {
				t.Errorf("an error without a place: %v", err)
			}
			return
		}
		sc, _ := steer.Feature{}.Spec(c.Document())
		if errs := sc.Validate(); len(errs) > 0 {
			t.Errorf("parsed, but not valid: %v", errs)
		}
		var names []string
		for _, s := range sc.Services {
			names = append(names, s.Name)
			checkDefaults(t, s)
		}
		if want := slices.Sorted(maps.Keys(c.Services)); !slices.Equal(names, want) {
			t.Errorf("services %q, want %q", names, want)
		}
	})
}

func checkDefaults(t *testing.T, s spec.Service) {
	t.Helper()
	if !kernel.ValidName(s.Name) || s.Slots < 1 || s.Slots > spec.MaxSlots || s.By == "" || s.ResetRate == nil || s.Engine == "" || s.OnEmpty == "" ||
		s.Backlog == nil || *s.Backlog < 0 || s.ReceiveBuffer == nil || *s.ReceiveBuffer < 0 || len(s.Endpoints()) == 0 {
		t.Errorf("service %q is %+v", s.Name, s)
	}
	slots := map[int]bool{}
	for _, m := range s.Members {
		if slots[m.Slot] || m.Slot < 0 || m.Slot >= s.Slots || m.String() == "none" {
			t.Errorf("service %q has member %+v", s.Name, m)
		}
		slots[m.Slot] = true
	}
}
