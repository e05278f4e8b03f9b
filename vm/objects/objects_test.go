// SPDX-License-Identifier: Apache-2.0

package objects

import (
	"encoding/json"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// TestLoads loads every object. A skip names the missing need.
func TestLoads(t *testing.T) {
	nstest.NeedRoot(t)
	for _, j := range Jobs() {
		t.Run(j.Name, func(t *testing.T) {
			r, err := j.Run()
			text, e := json.Marshal(r)
			if e != nil {
				t.Fatal(e)
			}
			t.Attr(Attribute, string(text))
			switch r.Result {
			case Failed:
				t.Fatal(err)
			case Missing:
				t.Skip("need: kernel " + r.Missing[0].Since + ": " + strings.ReplaceAll(err.Error(), "\n", "; "))
			}
		})
	}
}

// TestEveryObject compares the jobs with the generated files: every program of every object has a job.
func TestEveryObject(t *testing.T) {
	generated := find(t)
	if len(generated) < 15 {
		t.Fatalf("only %d objects found: %v", len(generated), generated)
	}
	programs := map[string]map[string]bool{}
	names := map[string]bool{}
	for _, j := range Jobs() {
		if names[j.Name] {
			t.Errorf("two jobs %q", j.Name)
		}
		names[j.Name] = true
		if j.Object == "" {
			continue
		}
		if programs[j.Object] == nil {
			programs[j.Object] = map[string]bool{}
		}
		if j.Spec == nil {
			continue
		}
		spec, err := j.Spec()
		if err != nil {
			t.Fatal(err)
		}
		for name := range spec.Programs {
			programs[j.Object][name] = programs[j.Object][name] || slices.Contains(j.Programs, name)
		}
	}
	if got := slices.Sorted(maps.Keys(programs)); !slices.Equal(got, generated) {
		t.Errorf("objects of jobs:\n%s\ngenerated objects:\n%s", strings.Join(got, "\n"), strings.Join(generated, "\n"))
	}
	for object, all := range programs {
		for name, has := range all {
			if !has {
				t.Errorf("program %s of %s has no job", name, object)
			}
		}
	}
}

// find returns the product's generated objects and images. Other modules, such as the lab, have their own.
func find(t *testing.T) (out []string) {
	root := repository(t)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != root {
			if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil || strings.HasPrefix(d.Name(), ".") {
				return fs.SkipDir
			}
		}
		for _, kind := range []string{"_bpfel.o", "_bpfel.image"} {
			if name, ok := strings.CutSuffix(path, kind); ok {
				name, _ = filepath.Rel(root, name) // both are absolute
				out = append(out, name)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(out)
	return out
}

func repository(t *testing.T) string {
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "go.mod")); err != nil {
		t.Fatal(err)
	}
	return dir
}
