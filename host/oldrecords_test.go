// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/releasetest"
	"github.com/weir-project/weir/kernel"
)

// keptFiles are the files of a release in /run/weir/records/<root>, by name. A file of an instance has only the name of the
// instance.
type keptFiles struct {
	Files     map[string]json.RawMessage `json:"files"`
	Instances map[string]json.RawMessage `json:"instances"`
	Remark    string                     `json:"remark"` // path of a remark below the directory of a file system
	Boot      string                     `json:"boot"`   // of the host that wrote them
}

// kept reads the files that this weir has written, with a change to be confirmed.
func (w world) kept(c *Config) (k keptFiles) {
	t := w.t
	t.Helper()
	k = keptFiles{Files: map[string]json.RawMessage{}, Instances: map[string]json.RawMessage{}, Boot: kernel.BootID()}
	before, err := w.save(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(before)
	if err != nil {
		t.Fatal(err)
	}
	l, err := w.Root.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Unlock()
	u := &Unconfirmed{ID: "1-2", Since: time.Unix(1e9, 0).UTC(), Boot: kernel.BootID(), Problem: "a reason", Retry: 7}
	u.begin(time.Hour)
	err = l.Keep(keptBefore, text)
	if err == nil {
		err = u.keep(l)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer forgetChange(l)
	w.Root.Remark(kernel.Instance{Scope: "1", Feature: "steer", Name: "telemetry"}, "0", "a reason")
	root := filepath.Join(kernel.RecordDir, url.PathEscape(w.Root.Path()))
	err = filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || d.Name() == "+serve" {
			return err
		}
		text, err := os.ReadFile(path)
		rel, _ := filepath.Rel(root, path)
		_, below, inside := strings.Cut(rel, "/")
		switch {
		case strings.Contains(rel, "+remarks"):
			k.Remark = below
		case strings.HasPrefix(d.Name(), "+"):
			k.Files[d.Name()] = text
		case inside:
			_, name, _ := strings.Cut(d.Name(), "+")
			k.Instances[name] = text
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// This weir reads the records of every release, its change to be confirmed, and the file in force.
func TestRecordsOfReleases(t *testing.T) {
	w, c := everyPinWorld(t)
	now := w.kept(c)
	if releasetest.Writing() != "" {
		text, err := json.MarshalIndent(now, "", "\t")
		if err != nil {
			t.Fatal(err)
		}
		releasetest.Write(t, "records.json", append(text, '\n'))
	}
	for _, version := range releasetest.Versions(t, "records.json") {
		var was keptFiles
		releasetest.Read(t, version, "records.json", &was)
		for name, text := range was.Files {
			for _, lost := range releasetest.LostKeys(text, now.Files[name]) {
				if !strings.Contains(lost, ".files.") { // keys are network namespaces
					t.Errorf("weir %s, %s: %s: read the file as that version wrote it", version, name, lost)
				}
			}
		}
		if was.Remark == "" || was.Remark != now.Remark {
			t.Errorf("weir %s has remarks in %s, and this weir in %s", version, was.Remark, now.Remark)
		}
		w.readsRecords(version, was)
		w.readsKept(version, was)
	}
}

// readsRecords checks that the records of a release show its instances on a host without pins.
func (w world) readsRecords(version string, was keptFiles) {
	t := w.t
	t.Helper()
	real := kernel.RecordDir
	kernel.RecordDir = t.TempDir()
	defer func() { kernel.RecordDir = real }()
	dirs, err := filepath.Glob(filepath.Join(real, url.PathEscape(w.Root.Path()), "*-*")) // of the present file system
	if err != nil || len(dirs) != 1 {
		t.Fatal(dirs, err)
	}
	dir := filepath.Join(kernel.RecordDir, url.PathEscape(w.Root.Path()), filepath.Base(dirs[0]))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range was.Instances {
		i := kernel.Instance{Scope: "1"}
		i.Feature, i.Name, _ = strings.Cut(name, "+")
		if err := os.WriteFile(filepath.Join(dir, "1+"+name), text, 0o600); err != nil {
			t.Fatal(err)
		}
		m, err := w.Root.Recorded(i)
		if err != nil || m.ABI == 0 || m.Version == "" || len(m.Config) == 0 || !json.Valid(m.Config) {
			t.Errorf("weir %s, record of %s: %+v, %v", version, name, m, err)
		}
	}
	for name := range was.Instances {
		i := kernel.Instance{Scope: "1"}
		i.Feature, i.Name, _ = strings.Cut(name, "+")
		if known, err := w.Root.Known(i.Feature); err != nil || !slices.Contains(known, i) {
			t.Errorf("weir %s: the record of %s is not seen: %v, %v", version, name, known, err)
		}
	}
	if len(was.Instances) < 15 {
		t.Errorf("weir %s: only %d records", version, len(was.Instances))
	}
}

// tempFiles are names of files in temporary directories of tests.
var tempFiles = regexp.MustCompile(`"/[^"]*/([0-9]{3}/[^"/]+)"`)

// readsKept checks the files beside the records.
func (w world) readsKept(version string, was keptFiles) {
	t := w.t
	t.Helper()
	l, err := w.Root.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Unlock()
	is, err := l.Kept(keptApplied)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Keep(keptApplied, is)
	defer forgetChange(l)
	here := func(name string) []byte { // as written since this boot
		quote := func(s string) []byte { b, _ := json.Marshal(s); return b }
		text := bytes.ReplaceAll(was.Files["+"+name], quote(was.Boot), quote(kernel.BootID()))
		return tempFiles.ReplaceAll(text, []byte(`"`+filepath.Dir(t.TempDir())+`/$1"`))
	}
	for _, name := range []string{keptApplied, keptChange, keptBefore} {
		if err := l.Keep(name, here(name)); err != nil || len(here(name)) == 0 {
			t.Fatal(name, err)
		}
	}
	if a, err := w.readApplied(); err != nil || a == nil || len(a.Hash) != 64 || !a.Success || a.Time.IsZero() || len(a.Files) == 0 {
		t.Errorf("weir %s: the file in force is %+v, %v", version, a, err)
	}
	if u, err := w.Unconfirmed(); err != nil || u == nil || u.ID != "1-2" || u.Window != time.Hour || !u.Since.Equal(time.Unix(1e9, 0)) || u.Problem != "a reason" || u.Retry != 7 || u.Deadline == 0 {
		t.Errorf("weir %s: the change is %+v, %v", version, u, err)
	}
	var saved savedHost
	if err := json.Unmarshal(here(keptBefore), &saved); err != nil {
		t.Fatal(err)
	}
	for _, f := range features {
		if len(saved[f.Name]) == 0 {
			t.Errorf("weir %s: nothing of %s is saved", version, f.Name)
			continue
		}
		if _, err := f.Value.(feature.Restorer).PlanRestore(t.Context(), w.Root, saved[f.Name]); err != nil {
			t.Errorf("weir %s: restoring %s: %v", version, f.Name, err)
		}
	}
}

// sometimes are keys of answers that depend on the moment: a neighbour that does not answer yet,
// and programs of others at the hooks of the host.
var sometimes = []string{"problems", "silent", "before", "after"}

// answers are the answers of weir serve's socket by path.
func (w world) answers() map[string]json.RawMessage {
	w.t.Helper()
	h := w.group(http.NotFoundHandler())
	now := map[string]json.RawMessage{}
	paths := []string{"/v1/status"}
	for _, f := range features {
		paths = append(paths, "/v1/"+f.Name+"/"+feature.StatusQuery)
	}
	for _, path := range append(paths, "/v1/steer/where?service=routers&address=192.0.2.1", "/v1/steer/devices?service=routers", "/v1/steer/templates?service=telemetry") {
		a := httptest.NewRecorder()
		h.ServeHTTP(a, httptest.NewRequestWithContext(w.t.Context(), "GET", path, nil))
		var v any
		if err := json.Unmarshal(a.Body.Bytes(), &v); a.Code != http.StatusOK || err != nil {
			w.t.Fatalf("%s: %d %s", path, a.Code, a.Body)
		}
		text, err := json.Marshal(withoutKeys(v, sometimes))
		if err != nil {
			w.t.Fatal(err)
		}
		now[path] = text
	}
	return now
}

// withoutKeys returns JSON without some keys.
func withoutKeys(v any, keys []string) any {
	switch v := v.(type) {
	case map[string]any:
		for k, x := range v {
			if slices.Contains(keys, k) {
				delete(v, k)
			} else {
				v[k] = withoutKeys(x, keys)
			}
		}
	case []any:
		for i, x := range v {
			v[i] = withoutKeys(x, keys)
		}
	}
	return v
}

// The socket of weir serve gives every answer of every release, with the same keys and types.
func TestAnswersOfReleases(t *testing.T) {
	w, _ := everyPinWorld(t)
	if releasetest.Writing() != "" {
		text, err := json.MarshalIndent(w.answers(), "", "\t")
		if err != nil {
			t.Fatal(err)
		}
		releasetest.Write(t, "answers.json", append(text, '\n'))
	}
	for _, version := range releasetest.Versions(t, "answers.json") {
		var was map[string]json.RawMessage
		releasetest.Read(t, version, "answers.json", &was)
		var lost []string
		_ = nstest.Poll(10*time.Second, func() error { // some states come late on a busy machine
			lost = nil
			now := w.answers()
			for path, text := range was {
				if now[path] == nil {
					lost = append(lost, path+" has no answer any more")
					continue
				}
				for _, l := range releasetest.LostKeys(text, now[path]) {
					lost = append(lost, path+": "+l)
				}
			}
			if len(lost) > 0 {
				return errors.New(lost[0])
			}
			return nil
		})
		for _, l := range lost {
			t.Errorf("weir %s answered %s: keep the key, older clients and scripts read it", version, l)
		}
	}
}
