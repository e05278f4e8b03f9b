// SPDX-License-Identifier: Apache-2.0

// Package releasetest compares formats with the fixtures of released versions. A fixture is a file in testdata/VERSION of
// the package that reads the format. A released one never changes. make release-fixtures writes those of a new version.
package releasetest

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// Writing returns the version of the fixtures to write, "" for none.
func Writing() string { return os.Getenv("WEIR_RELEASE_FIXTURES") }

// Versions lists the versions with a fixture, the oldest first.
func Versions(t testing.TB, file string) (versions []string) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join("testdata", "*.*.*", file))
	if err != nil || len(paths) == 0 {
		t.Fatalf("testdata/VERSION/%s: no fixture, %v: run make release-fixtures", file, err)
	}
	for _, p := range paths {
		versions = append(versions, filepath.Base(filepath.Dir(p)))
	}
	return versions
}

// Write writes a fixture of the version of Writing.
func Write(t testing.TB, file string, text []byte) {
	t.Helper()
	path := filepath.Join("testdata", Writing(), file)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, text, 0o644)); err != nil {
		t.Fatal(err)
	}
}

// Read reads a fixture into a value.
func Read(t testing.TB, version, file string, into any) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", version, file))
	if err == nil {
		err = json.Unmarshal(text, into)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// message is a message of a release: its bytes, and their meaning.
type message struct {
	Name  string          `json:"name"`
	Bytes string          `json:"bytes"` // hexadecimal
	Value json.RawMessage `json:"value"`
}

// Messages checks a format of bytes. written are examples of all messages, by name, as this version writes them. decode
// reads bytes. The bytes of each release must decode to the values of that release, and no message may be missing.
func Messages(t *testing.T, file string, written map[string][]byte, decode func([]byte) (any, error)) {
	t.Helper()
	value := func(name string, b []byte) json.RawMessage {
		v, err := decode(b)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			return nil
		}
		text, err := json.Marshal(v)
		if err != nil {
			t.Fatal(name, err)
		}
		return text
	}
	if Writing() != "" {
		var all []message
		for _, name := range slices.Sorted(maps.Keys(written)) {
			all = append(all, message{name, hex.EncodeToString(written[name]), value(name, written[name])})
		}
		text, err := json.MarshalIndent(all, "", "\t")
		if err != nil {
			t.Fatal(err)
		}
		Write(t, file, append(text, '\n'))
	}
	for _, version := range Versions(t, file) {
		var all []message
		Read(t, version, file, &all)
		for _, m := range all {
			b, err := hex.DecodeString(m.Bytes)
			if err != nil {
				t.Fatal(err)
			}
			for _, lost := range Lost(m.Value, value(m.Name, b)) {
				t.Errorf("message %s of weir %s: %s: read it as that version did, or raise the version of the format and read both", m.Name, version, lost)
			}
			if written[m.Name] == nil {
				t.Errorf("message %s of weir %s: this test has no example of it any more", m.Name, version)
			}
		}
	}
}

// Lost lists the keys and values of JSON that another one lacks. More keys are no loss.
func Lost(was, is json.RawMessage) []string {
	return compare(was, is, func(a, b any) bool { return a == b })
}

// LostKeys is Lost for the keys and the types of values. Lists have the type of their first element.
func LostKeys(was, is json.RawMessage) []string {
	return compare(was, is, func(a, b any) bool { return a == nil || fmt.Sprintf("%T", a) == fmt.Sprintf("%T", b) })
}

func compare(was, is json.RawMessage, same func(a, b any) bool) (out []string) {
	var a, b any
	for text, to := range map[*json.RawMessage]*any{&was: &a, &is: &b} {
		d := json.NewDecoder(bytes.NewReader(*text))
		d.UseNumber() // a float has no room for 64 bits
		if err := d.Decode(to); err != nil {
			return []string{err.Error()}
		}
	}
	var walk func(at string, a, b any)
	walk = func(at string, a, b any) {
		switch a := a.(type) {
		case map[string]any:
			b, _ := b.(map[string]any)
			for k, x := range a {
				if y, ok := b[k]; ok {
					walk(at+"."+k, x, y)
				} else {
					out = append(out, fmt.Sprintf("%s.%s is gone", at, k))
				}
			}
		case []any:
			b, _ := b.([]any)
			for i, x := range a {
				if i < len(b) {
					walk(fmt.Sprintf("%s[%d]", at, i), x, b[i])
				} else {
					out = append(out, fmt.Sprintf("%s[%d] is gone", at, i))
				}
			}
		default:
			if !same(a, b) {
				out = append(out, fmt.Sprintf("%s was %v, and is %v", at, a, b))
			}
		}
	}
	walk("", a, b)
	slices.Sort(out)
	return out
}
