// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weir-project/weir/kernel/internal/confined"
)

// Files beside the pins belong to their owner, so readers bound them. Their error names the file.
func TestSizesOfKeptTexts(t *testing.T) {
	ownRecords(t)
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	named := func(what string, err error, path string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "more than 16 MiB") {
			t.Errorf("%s: %v", what, err)
		}
	}
	text := bytes.Repeat([]byte("x"), confined.MaxFile+1)
	named("written", l.Keep("small", text), r.KeptPath("small"))
	if b, err := r.Kept("small"); err != nil || b != nil {
		t.Errorf("a refused text: %d bytes, %v", len(b), err)
	}
	large := func(n int) func(io.Writer) error {
		return func(w io.Writer) (err error) {
			for ; n > 0 && err == nil; n-- {
				_, err = w.Write(text)
			}
			return err
		}
	}
	if err := l.KeepLarge("large", large(1)); err != nil {
		t.Fatal(err)
	}
	f, size, err := r.KeptLarge("large")
	if err != nil || size != int64(len(text)) {
		t.Fatalf("%d bytes of %d, %v", size, len(text), err)
	}
	f.Close()
	if err := l.KeepLarge("large", large(maxLarge/len(text)+1)); err == nil || !strings.Contains(err.Error(), "more than 256 MiB") {
		t.Errorf("written: %v", err)
	}
	if err := os.Truncate(r.KeptPath("large"), maxLarge+1); err != nil {
		t.Fatal(err)
	}
	if _, _, err := r.KeptLarge("large"); err == nil || !strings.Contains(err.Error(), "more than 256 MiB") {
		t.Errorf("read: %v", err)
	}
	_, err = r.Kept("large")
	named("read", err, r.KeptPath("large"))
	if err := l.Forget("large"); err != nil {
		t.Error(err)
	}
}

// The next lock replaces a record of another size or form.
func TestDamagedRecordIsReplaced(t *testing.T) {
	ownRecords(t)
	r := newRoot(t)
	l := lock(t, r)
	if err := publish(l, instance, 1); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(r.recordsAt(r.device()), recordName(instance))
	l.Unlock()
	for what, damage := range map[string]func() error{
		"text":     func() error { return os.WriteFile(path, []byte(`{"dir": "none"}`), 0o600) },
		"sparse":   func() error { return os.Truncate(path, 1<<40) },
		"a record": func() error { return nil },
	} {
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		l := lock(t, r)
		if rec, err := r.readRecord(path); err != nil || len(rec.Maps) != 2 {
			t.Errorf("%s: %+v, %v", what, rec, err)
		}
		l.Unlock()
	}
	l = lock(t, r)
	defer l.Unlock()
	if err := l.Remove(instance); err != nil {
		t.Error(err)
	}
}

// The owner of the records can write any names. They become no paths, and texts stay in one line.
func TestNamesInRecords(t *testing.T) {
	ownRecords(t)
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	i, _ := publishHere(t, l)
	rec, ok := l.recorded(i)
	if !ok {
		t.Fatal("no record")
	}
	for _, name := range []string{"../../other", "a\n! all is well", "a.b", ""} {
		rec.Maps[name], rec.Links[name] = 1, linkRecord{ID: 1}
		forged := rec
		forged.Instance.Name = name
		l.writeRecord(forged) // fails with a slash
	}
	l.writeRecord(rec)
	r.Remark(i, "why", "a reason\n! all is well")
	if got := r.Remarks(i, "why"); got != "a reason; ! all is well" {
		t.Errorf("remark %q", got)
	}
	if rec, ok := l.recorded(i); !ok || len(rec.Maps) != 1 || len(rec.Links) != 1 {
		t.Errorf("recorded %+v", rec)
	}
	wantKinds(t, r, "no entry is a pin")
	if all, err := r.Known(i.Feature); err != nil || len(all) != 1 {
		t.Errorf("known instances %q, %v", all, err)
	}
	if err := l.Remove(i); err != nil {
		t.Error(err)
	}
}
