// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
)

// ownRecords gives the test a directory of records of its own, as below /run.
func ownRecords(t *testing.T) {
	t.Helper()
	nstest.NeedRoot(t)
	was := RecordDir
	RecordDir = filepath.Join(t.TempDir(), "weir", "records")
	t.Cleanup(func() { RecordDir = was })
}

// Root's commands follow no link of the user of weir serve.
func TestLinksOfTheOwner(t *testing.T) {
	ownRecords(t)
	r := newRoot(t)
	if err := r.Prepare(t.Context(), nobody, nobody); err != nil {
		t.Fatal(err)
	}
	secret := t.TempDir()
	file := filepath.Join(secret, "file")
	if err := errors.Join(os.WriteFile(file, []byte("secret"), 0o600), os.Chmod(secret, 0o700)); err != nil {
		t.Fatal(err)
	}
	untouched := func(what string) {
		t.Helper()
		text, err := os.ReadFile(file)
		entries, derr := os.ReadDir(secret)
		if err != nil || derr != nil || string(text) != "secret" || len(entries) != 1 {
			t.Errorf("%s: %q, %v, %v, %v", what, text, err, entries, derr)
		}
		for path, mode := range map[string]os.FileMode{file: 0o600, secret: 0o700} {
			if st, err := os.Lstat(path); err != nil || st.Mode().Perm() != mode || st.Sys().(*syscall.Stat_t).Uid != 0 {
				t.Errorf("%s: %s is now %v, %v", what, path, st, err)
			}
		}
	}
	// work runs every change of records and pins. It may fail.
	work := func() {
		l, err := r.Lock(t.Context())
		if err != nil {
			return
		}
		_ = publish(l, instance, 1)
		r.Remark(instance, "why", "a reason")
		_ = errors.Join(l.Keep("change", []byte("text")), l.SetGroup(readers), l.Forget("change"), l.Remove(instance))
		l.Unlock()
	}
	plant := func(what, path, target string) {
		t.Helper()
		if err := errors.Join(r.Prepare(t.Context(), nobody, nobody), os.RemoveAll(path), os.Symlink(target, path)); err != nil {
			t.Fatal(err)
		}
		work()
		untouched(what)
		if err := os.RemoveAll(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
	}
	work()
	plant("the directory of records", RecordDir, secret)
	plant("the records of a root", r.recordsPath(), secret)
	plant("a new file", r.KeptPath("change")+".new", file)
	plant("a file", r.KeptPath("change"), file)
	plant("pins of a namespace", filepath.Join(r.path, instance.Scope), secret)
	work()
	untouched("at the end")
}

// A file of root stays root's, and the second name is removed, if the owner of the records gives it a second name there. Kernels with
// fs.protected_hardlinks=0 permit that. The types are the ones that a user can link.
func TestSecondNamesInRecords(t *testing.T) {
	ownRecords(t)
	r := newRoot(t)
	if err := r.Prepare(t.Context(), nobody, nobody); err != nil {
		t.Fatal(err)
	}
	vault := filepath.Join(filepath.Dir(runDir()), "vault") // links do not cross file systems
	if err := os.Mkdir(vault, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, create := range map[string]func(path string) error{
		"file":   func(path string) error { return os.WriteFile(path, nil, 0o600) },
		"fifo":   func(path string) error { return syscall.Mkfifo(path, 0o600) },
		"socket": func(path string) error { return syscall.Mknod(path, syscall.S_IFSOCK|0o600, 0) },
	} {
		path, second := filepath.Join(vault, name), filepath.Join(r.recordsPath(), name)
		if err := errors.Join(create(path), os.Link(path, second)); err != nil {
			t.Fatal(err)
		}
		if err := r.files().Give(second, 0o600, nobody, nobody); err == nil || !strings.Contains(err.Error(), second+": it has a second name") {
			t.Errorf("%s: %v", name, err)
		}
		if err := r.Prepare(t.Context(), nobody, nobody); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Lstat(second); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the second name of %s stays: %v", name, err)
		}
		if st, err := os.Lstat(path); err != nil || st.Mode().Perm() != 0o600 || st.Sys().(*syscall.Stat_t).Uid != 0 {
			t.Errorf("%s is now %v, %v", name, st, err)
		}
	}
	own := filepath.Join(r.recordsPath(), "own")
	if err := errors.Join(os.WriteFile(own, nil, 0o600), os.Chown(own, nobody, nobody), os.Link(own, own+"2"), r.Prepare(t.Context(), nobody, nobody)); err != nil {
		t.Errorf("two names of a file of the user: %v", err)
	}
}

// besideForeign returns the root of another program, which has an instance with a link, and a second root.
func besideForeign(t *testing.T) (foreign, r *Root, theirs Instance) {
	t.Helper()
	foreign, r = newRoot(t), OpenRoot(newRoot(t).path+"x")
	t.Cleanup(func() { os.RemoveAll(r.path) })
	other := lock(t, foreign)
	defer other.Unlock()
	theirs, ln := publishHere(t, other)
	ln.Close()
	return foreign, r, theirs
}

// A second name of another program's pin gives nobody rights to it, and a removal of that name does not detach its link.
func TestSecondNamesOfPins(t *testing.T) {
	ownRecords(t)
	nstest.Enter(t)
	foreign, r, theirs := besideForeign(t)
	if err := r.Prepare(t.Context(), nobody, nobody); err != nil {
		t.Fatal(err)
	}
	l := lock(t, r)
	defer l.Unlock()
	if err := publishWith(l, instance, 1, nil); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{mapPrefix + "a", linkPrefix + "lookup"} {
		path, second := filepath.Join(foreign.dir(theirs), name), filepath.Join(r.dir(instance), name+"2")
		if err := os.Link(path, second); err != nil {
			t.Fatal(err)
		}
		if err := l.setRights(second, false, nobody); err == nil || !strings.Contains(err.Error(), "has a second name") {
			t.Errorf("%s: %v", name, err)
		}
		if st, err := os.Lstat(path); err != nil || st.Sys().(*syscall.Stat_t).Uid != 0 {
			t.Errorf("%s is now %v, %v", path, st, err)
		}
	}
	if o, err := l.Open(instance); err == nil || !strings.Contains(err.Error(), "has a second name") {
		o.Close()
		t.Errorf("opened with a map of another program: %v", err)
	}
	if err := l.RemoveLink(instance, "lookup2"); err != nil {
		t.Error(err)
	}
	o, err := foreign.Open(theirs)
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	pinned, err := o.Link("lookup")
	if err != nil {
		t.Fatal(err)
	}
	defer pinned.Close()
	if info, err := pinned.Info(); err != nil || newTarget(info).Where == 0 {
		t.Errorf("the foreign link is detached: %+v, %v", info, err)
	}
	if err := l.Remove(instance); err != nil {
		t.Error(err)
	}
}

// Pins and records belong to the owner of weir's directory in /run, also the later ones of root.
func TestPrepare(t *testing.T) {
	ownRecords(t)
	r := newRoot(t)
	publishOne := func() {
		t.Helper()
		l := lock(t, r)
		defer l.Unlock()
		if err := publish(l, instance, 1); err != nil {
			t.Fatal(err)
		}
	}
	owned := func(uid uint32) {
		t.Helper()
		for _, top := range []string{r.path, runDir()} {
			n := 0
			if err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
				if err != nil {
					return err
				}
				n++
				if info, err := d.Info(); err != nil || info.Sys().(*syscall.Stat_t).Uid != uid {
					t.Errorf("%s: %v, %v, want owner %d", path, info, err, uid)
				}
				return nil
			}); err != nil || n < 3 {
				t.Errorf("%s: %d entries, %v", top, n, err)
			}
		}
	}
	publishOne()
	owned(0)
	if err := r.Prepare(t.Context(), nobody, nobody); err != nil {
		t.Fatal(err)
	}
	owned(nobody)
	publishOne()
	owned(nobody)
	l := lock(t, r)
	err := l.Remove(instance)
	l.Unlock()
	if _, serr := os.Stat(r.path); err != nil || serr != nil {
		t.Errorf("after the last instance, its owner cannot create the directory again: %v, %v", err, serr)
	}
}

// Root's commands use no pin of another directory by a link of their owner: they would detach the link of another program.
func TestForeignPins(t *testing.T) {
	ownRecords(t)
	nstest.Enter(t)
	foreign, r, theirs := besideForeign(t)
	attached := func(what string) {
		t.Helper()
		o, err := foreign.Open(theirs)
		if err != nil {
			t.Fatal(err)
		}
		defer o.Close()
		pinned, err := o.Link("lookup")
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		defer pinned.Close()
		info, err := pinned.Info()
		if err != nil || newTarget(info).Where == 0 {
			t.Errorf("%s: the foreign link is detached: %+v, %v", what, info, err)
		}
	}
	attached("at first")
	for _, plant := range []string{linkPrefix + "lookup", linkPrefix + "dev2", mapPrefix + "a", metaPin, ""} {
		l := lock(t, r)
		if err := publishWith(l, instance, 1, nil); err != nil {
			t.Fatal(err)
		}
		l.Unlock()
		path := filepath.Join(r.dir(instance), plant)
		target := filepath.Join(foreign.dir(theirs), plant)
		if plant == linkPrefix+"dev2" {
			target = filepath.Join(foreign.dir(theirs), linkPrefix+"lookup")
		}
		if err := errors.Join(os.RemoveAll(path), os.Symlink(target, path)); err != nil {
			t.Fatal(err)
		}
		l = lock(t, r)
		if plant == linkPrefix+"lookup" {
			_ = l.RemoveLink(instance, "lookup")
		}
		if o, err := l.Open(instance); err == nil {
			if plant == metaPin || plant == "" || plant == mapPrefix+"a" {
				t.Errorf("%s: opened through a link", plant)
			}
			o.Close()
		}
		_, _ = l.Restore(instance, anyMap)
		_ = l.SetGroup(readers)
		_ = l.Remove(instance)
		l.Unlock()
		attached("a link in place of " + plant)
		if err := os.RemoveAll(r.path); err != nil {
			t.Fatal(err)
		}
	}
}

// A pin root that another user created first is rejected.
func TestPinRootOfAnotherUser(t *testing.T) {
	ownRecords(t)
	r := newRoot(t)
	if err := errors.Join(os.Mkdir(r.path, 0o777), os.Chown(r.path, nobody, nobody)); err != nil {
		t.Fatal(err)
	}
	if l, err := r.Lock(t.Context()); err == nil {
		l.Unlock()
		t.Fatal("locked")
	} else if !strings.Contains(err.Error(), "belongs to user 65534") || !strings.Contains(err.Error(), "rm -r") {
		t.Error(err)
	}
}

// A link of another user in place of the pin root is named, also if the kernel lets nobody follow it
// (fs.protected_symlinks).
func TestPinRootIsALink(t *testing.T) {
	ownRecords(t)
	r := newRoot(t)
	above := filepath.Join(nstest.BPFFS, "open")
	target := filepath.Join(nstest.BPFFS, "target")
	if err := errors.Join(os.Mkdir(above, 0o700), os.Mkdir(target, 0o700), os.Chmod(above, 0o1777)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = errors.Join(os.RemoveAll(above), os.RemoveAll(target)) })
	r.path = filepath.Join(above, "weir")
	for _, to := range []string{target, filepath.Join(above, "nowhere")} {
		if err := errors.Join(os.RemoveAll(r.path), os.Symlink(to, r.path), os.Lchown(r.path, nobody, nobody)); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		l, err := r.Lock(ctx)
		cancel()
		if err == nil {
			l.Unlock()
			t.Fatal("locked")
		}
		want := r.path + " is a symbolic link of user 65534: remove it"
		for what, err := range map[string]error{"lock": err, "writable": r.Writable()} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s, a link to %s: %v, want %q", what, to, err, want)
			}
		}
		if _, err := r.Instances(""); err != nil && !strings.Contains(err.Error(), want) { // fs.protected_symlinks=1
			t.Errorf("list, a link to %s: %v, want %q", to, err, want)
		}
	}
}
