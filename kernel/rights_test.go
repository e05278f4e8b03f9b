// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"github.com/weir-project/weir/kernel/internal/parts"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/weir-project/weir/internal/nstest"
)

const (
	nobody  = 65534 // user and group of a child without rights
	readers = 4747  // group with read access
)

// playRead prints this process's rights on the pins of the instance below a root: ROOT.
func playRead(f []string) error {
	r := OpenRoot(f[0])
	v, err := version(r, instance)
	fmt.Printf("read: %d %v\n", v, err)
	fmt.Printf("unreadable: %v\n", errors.Is(err, ErrUnreadable))
	_, err = r.Instances("")
	fmt.Printf("list: %v\n", err)
	_, err = ebpf.LoadPinnedMap(filepath.Join(r.dir(instance), "map_a"), nil)
	fmt.Printf("write: %v\n", errors.Is(err, os.ErrPermission))
	_, err = link.LoadPinnedLink(filepath.Join(r.dir(instance), "link_lookup"), nil)
	fmt.Printf("link: %v\n", errors.Is(err, os.ErrPermission))
	err = os.Remove(filepath.Join(r.dir(instance), "map_a"))
	fmt.Printf("unpin: %v\n", errors.Is(err, os.ErrPermission))
	return nil
}

// as runs a role as another user. It returns the printed lines by their text before the colon.
func as(t *testing.T, cred syscall.Credential, role string, args ...any) map[string]string {
	t.Helper()
	c := nstest.Child(role, args...)
	c.Dir = "/"
	c.SysProcAttr.Credential = &cred
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", role, args, err, out)
	}
	said := map[string]string{}
	for line := range strings.Lines(string(out)) {
		what, text, _ := strings.Cut(strings.TrimSpace(line), ": ")
		said[what] = text
	}
	return said
}

// others makes the bpffs searchable for all users, as systemd and weir mount it.
func others(t *testing.T) {
	t.Helper()
	nstest.NeedRoot(t)
	if err := os.Chmod(nstest.BPFFS, 0o711); err != nil {
		t.Fatal(err)
	}
}

// The group lists the instances, and nobody but the owner opens a pin. The kernel would let a reader of the group pin a
// read-only descriptor again, and open the new pin for writing.
func TestOwnerOpensPinsAndNobodyElse(t *testing.T) {
	others(t)
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	if err := publish(l, instance, 1); err != nil {
		t.Fatal(err)
	}
	if err := l.SetGroup(readers); err != nil {
		t.Fatal(err)
	}
	t.Run("stranger", func(t *testing.T) {
		said := as(t, syscall.Credential{Uid: nobody, Gid: nobody}, "read", r.path)
		if said["unreadable"] != "true" || !strings.Contains(said["read"], fmt.Sprintf("run as root or group %d", readers)) {
			t.Errorf("opens: %s", said["read"]) // it cannot search the directory
		}
		if !strings.Contains(said["list"], "no permission to read weir's pins") {
			t.Errorf("lists: %s", said["list"])
		}
		refused(t, said, "write", "link", "unpin")
	})
	for name, cred := range map[string]syscall.Credential{
		"group":         {Uid: nobody, Gid: readers},
		"supplementary": {Uid: nobody, Gid: nobody, Groups: []uint32{12, readers}},
	} {
		t.Run(name, func(t *testing.T) {
			said := as(t, cred, "read", r.path)
			if said["unreadable"] != "true" || !strings.Contains(said["read"], "run as root, or ask a running 'weir serve'") || said["list"] != "<nil>" {
				t.Errorf("opens: %s; lists: %s", said["read"], said["list"])
			}
			refused(t, said, "write", "link", "unpin")
		})
	}
	wantVersion(t, r, instance, 1)
	if err := l.Remove(instance); err != nil {
		t.Error(err)
	}
}

func refused(t *testing.T, said map[string]string, what ...string) {
	t.Helper()
	for _, w := range what {
		if said[w] != "true" {
			t.Errorf("%s is not refused for lack of permission: %q", w, said[w])
		}
	}
}

// The group can read the records despite the creator's umask. The directories above are open to everybody, because they
// hold weir's public sockets.
func TestRightsOfRecords(t *testing.T) {
	was := RecordDir
	RecordDir = filepath.Join(t.TempDir(), "weir", "records")
	defer func() { RecordDir = was }()
	defer syscall.Umask(syscall.Umask(0o077))
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	if err := publish(l, instance, 1); err != nil {
		t.Fatal(err)
	}
	r.Remark(instance, "why", "a reason")
	if err := l.Keep("change", []byte("text")); err != nil {
		t.Fatal(err)
	}
	check := func(path string, mode os.FileMode, gid int) {
		t.Helper()
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if got := st.Sys().(*syscall.Stat_t).Gid; st.Mode().Perm() != mode || int(got) != gid {
			t.Errorf("%s: %v of group %d, want %v of %d", path, st.Mode().Perm(), got, mode, gid)
		}
	}
	for _, gid := range []int{0, readers} {
		if err := l.SetGroup(gid); err != nil {
			t.Fatal(err)
		}
		check(filepath.Dir(RecordDir), 0o755, 0)
		check(RecordDir, 0o755, 0)
		check(r.recordsPath(), 0o750, gid)
		check(r.KeptPath("change"), 0o640, gid)
		check(r.recordsAt(r.device()), 0o750, gid)
		check(filepath.Join(r.recordsAt(r.device()), recordName(instance)), 0o640, gid)
		check(r.remarksPath(instance), 0o750, gid)
		check(filepath.Join(r.remarksPath(instance), "why"), 0o640, gid)
	}
	if err := errors.Join(l.Forget("change"), l.Remove(instance)); err != nil {
		t.Error(err)
	}
}

// Later publications get the permissions of existing pins, and a change of group affects both.
func TestRights(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	if got, want := tree(t, r), []string{". 0750 0"}; !slices.Equal(got, want) {
		t.Errorf("new root %v, want %v", got, want)
	}
	mustPublish := func(i Instance) {
		t.Helper()
		if err := publish(l, i, 1); err != nil {
			t.Fatal(err)
		}
	}
	second := Instance{Scope: "4026531840", Feature: "test", Name: "two"}
	mustPublish(instance)
	wantRights(t, r, 0)
	for _, gid := range []int{readers, readers + 1, 0} {
		if err := l.SetGroup(gid); err != nil {
			t.Fatal(err)
		}
		wantRights(t, r, gid)
		mustPublish(instance) // replaced
		mustPublish(second)   // new, or replaced
		wantRights(t, r, gid)
	}
	if err := errors.Join(l.Remove(instance), l.Remove(second)); err != nil {
		t.Error(err)
	}
}

// A root that is a mount point has files of the kernel and of others. Their rights stay.
func TestRightsOfOthers(t *testing.T) {
	ownRecords(t)
	r := OpenRoot(nstest.BPFFS)
	if st, err := os.Stat(r.path); err != nil {
		t.Fatal(err)
	} else {
		t.Cleanup(func() { _ = errors.Join(os.Chmod(r.path, st.Mode().Perm()), os.Chown(r.path, 0, 0)) })
	}
	l, err := r.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Unlock()
	if err := publish(l, instance, 1); err != nil {
		t.Fatal(err)
	}
	m, err := newMap()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	theirs := []string{"map_theirs", "tool/map_theirs", "tool/globals/one/map_theirs", HostScope + "/map_theirs", HostScope + "/test/one/theirs"}
	for _, name := range theirs {
		path := filepath.Join(r.path, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		c, err := m.Clone()
		if err == nil {
			err = c.Pin(path)
			c.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		_ = os.RemoveAll(filepath.Join(r.path, "tool"))
		_ = os.Remove(filepath.Join(r.path, "map_theirs"))
	})
	if err := l.SetGroup(readers); err != nil {
		t.Fatal(err)
	}
	for _, name := range append(theirs, "maps.debug", "progs.debug", "tool", "tool/globals/one") {
		st, err := os.Stat(filepath.Join(r.path, name))
		if errors.Is(err, os.ErrPermission) && strings.HasSuffix(name, ".debug") {
			continue // a kernel without these files permits no name with a dot (kernel/bpf/inode.c, bpf_lookup)
		}
		if err != nil {
			t.Error(err)
		} else if st.Sys().(*syscall.Stat_t).Gid != 0 || st.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has rights %v and group %d", name, st.Mode(), st.Sys().(*syscall.Stat_t).Gid)
		}
	}
	if st, err := os.Stat(filepath.Join(r.dir(instance), "map_a")); err != nil || st.Sys().(*syscall.Stat_t).Gid != readers || st.Mode().Perm() != 0o600 {
		t.Errorf("weir's map: %v, %v", st, err)
	}
	for _, name := range theirs[3:] {
		_ = os.Remove(filepath.Join(r.path, name))
	}
	if err := l.Remove(instance); err != nil {
		t.Error(err)
	}
}

// No step leaves a pin open to the group, also not the recovery of a lost one.
func TestPinsAreTheOwnersAlone(t *testing.T) {
	others(t)
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	m, err := newMap()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := l.Publish(instance, metaOf(1), Pins{Maps: map[string]*ebpf.Map{"a": m, "b": m}}); err != nil {
		t.Fatal(err)
	}
	for _, gid := range []int{readers, 0, readers} {
		if err := l.SetGroup(gid); err != nil {
			t.Fatal(err)
		}
		wantRights(t, r, gid)
	}
	rec, ok := l.recorded(instance)
	if !ok {
		t.Fatal("no record")
	}
	if err := os.Remove(filepath.Join(r.dir(instance), mapPrefix+"b")); err != nil {
		t.Fatal(err)
	}
	if lacks, err := l.restoreMaps(r.dir(instance), rec, parts.Parts{}, func(string) bool { return true }); err != nil || len(lacks) > 0 {
		t.Fatalf("lacks %q: %v", lacks, err)
	}
	wantRights(t, r, readers)
	if err := l.Remove(instance); err != nil {
		t.Error(err)
	}
}

func wantRights(t *testing.T, r *Root, gid int) {
	t.Helper()
	for _, line := range tree(t, r) {
		name, rights, _ := strings.Cut(line, " ")
		mode := "0750"
		switch base := filepath.Base(name); {
		case strings.HasPrefix(base, "map_"), base == "meta", strings.HasPrefix(base, "link_"):
			mode = "0600"
		}
		if want := fmt.Sprintf("%s %d", mode, gid); rights != want {
			t.Errorf("%s has rights and group %s, want %s", name, rights, want)
		}
	}
}
