// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel/internal/confined"
	"github.com/weir-project/weir/kernel/internal/mounts"
)

// RecordDir holds a record of every published instance, with one directory for each BPF file system used by a root. A
// record lists the expected pins and attachments, and detects lost ones. It also stores the instance's meta: a service
// with lost pins keeps its seed. /run and the BPF file systems both end at a reboot.
var RecordDir = "/run/weir/records"

// record describes a published instance.
type record struct {
	Instance Instance              `json:"instance"`
	Dir      uint64                `json:"dir"` // inode number of its directory
	Meta     []byte                `json:"meta"`
	Maps     map[string]ebpf.MapID `json:"maps"`
	Links    map[string]linkRecord `json:"links,omitempty"`
	Filters  []filterRecord        `json:"filters,omitempty"` // used in place of links

	cookie uint64 // from meta
}

// linkRecord is a link with its hook.
type linkRecord struct {
	ID link.ID `json:"id"`
	target
}

// rootRecord describes the visibility of a BPF file system.
type rootRecord struct {
	Mounts uint64 `json:"mounts"` // inode number of the writer's mount namespace
	Host   bool   `json:"host"`   // process 1 saw the same file system at the root's path
}

const rootRecordName = "+root"

// device returns the device number of the BPF file system at the root's path, or 0 if there is none.
func (r *Root) device() uint64 { return mounts.BPF(r.path) }

// recordsPath returns the directory with the records of all file systems at the root's path.
func (r *Root) recordsPath() string { return filepath.Join(RecordDir, url.PathEscape(r.path)) }

func (r *Root) recordsAt(device uint64) string {
	return filepath.Join(r.recordsPath(), fmt.Sprintf("%d-%.8s", device, bootID()))
}

func bootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "unknown"
	}
	return string(b)
}

func recordName(i Instance) string { return i.Scope + "+" + i.Feature + "+" + i.Name }

// Unrecorded returns the first failure to write a record under this lock, or nil.
func (l *WriteLock) Unrecorded() error { return l.unrecorded }

// note records the current pins of an instance. Records are optional: without them fewer faults are detected and
// recovered. See Unrecorded.
func (l *WriteLock) note(i Instance) {
	rec := record{Instance: i, Maps: map[string]ebpf.MapID{}, Links: map[string]linkRecord{}}
	st, err := os.Stat(l.dirPath(i))
	if err != nil {
		return
	}
	rec.Dir = st.Sys().(*syscall.Stat_t).Ino
	o, err := l.Open(i)
	if err != nil {
		return
	}
	defer o.Close()
	rec.Meta = o.Meta.marshal()
	for name, m := range o.Maps {
		if info, err := m.Info(); err == nil {
			rec.Maps[name], _ = info.ID()
		}
	}
	names, _ := o.Links()
	for _, name := range names {
		if ln, err := o.Link(name); err == nil {
			rec.noteLink(name, ln)
			ln.Close()
		}
	}
	if was, err := l.readRecord(filepath.Join(l.recordsAt(l.device()), recordName(i))); err == nil {
		rec.Filters = was.Filters // they are at devices and have no pins
	}
	l.writeRecord(rec)
}

// noteLink records the hook of a link, unless the link is detached.
func (rec *record) noteLink(name string, ln Link) {
	info, err := ln.Info()
	if err != nil {
		return
	}
	if t := newTarget(info); t.Where != 0 || !t.Kind.detachable() {
		rec.Links[name] = linkRecord{ID: info.ID, target: t}
	}
}

// noteOne changes the record of one instance.
func (l *WriteLock) noteOne(i Instance, change func(*record)) {
	rec, err := l.readRecord(filepath.Join(l.recordsAt(l.device()), recordName(i)))
	if err != nil {
		l.note(i)
		return
	}
	if rec.Links == nil {
		rec.Links = map[string]linkRecord{}
	}
	change(&rec)
	l.writeRecord(rec)
}

func (l *WriteLock) writeRecord(rec record) {
	dir := l.recordsAt(l.device())
	var err error
	if _, missing := os.Stat(filepath.Join(dir, rootRecordName)); missing != nil {
		err = l.openRecords(dir)
	}
	var b []byte
	if err == nil {
		b, err = json.Marshal(rec)
	}
	if err == nil {
		err = l.replace(filepath.Join(dir, recordName(rec.Instance)), b)
	}
	if err != nil {
		l.unrecorded = cmp.Or(l.unrecorded, err)
	}
}

// makeRecords creates a directory of records, readable for the group, or dir in it. The directories above are open to
// everybody, despite a umask: they hold weir's public sockets.
func (r *Root) makeRecords(dir string) error {
	for _, d := range []string{filepath.Dir(RecordDir), RecordDir} {
		if _, err := os.Stat(d); err == nil {
			continue // keep the permissions chosen by its creator
		}
		if err := r.makePublic(d); err != nil {
			return err
		}
	}
	for _, d := range []string{r.recordsPath(), dir} {
		if err := errors.Join(r.files().MkdirAll(d, 0o750), r.setRights(d, true, r.gid())); err != nil {
			return err
		}
	}
	return nil
}

// makePublic creates weir's directory in /run, or the one of records in it.
func (r *Root) makePublic(d string) error {
	if d == runDir() {
		return errors.Join(os.MkdirAll(d, 0o755), os.Chmod(d, 0o755))
	}
	if err := r.files().Mkdir(d, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return r.give(d, 0o755, -1)
}

// openRecords creates the directory for the records of the root's file system.
func (l *WriteLock) openRecords(dir string) error {
	if err := l.makeRecords(dir); err != nil {
		return err
	}
	space, err := mounts.Namespace()
	if err != nil {
		return err
	}
	b, err := json.Marshal(rootRecord{Mounts: space, Host: mounts.BPF("/proc/1/root"+l.path) == l.device()})
	if err != nil {
		return err
	}
	return l.replace(filepath.Join(dir, rootRecordName), b)
}

// replace replaces a file of the records atomically.
func (r *Root) replace(path string, b []byte) error {
	return r.files().Replace(path, b, confined.MaxFile, func(next string) error { return r.setRights(next, false, r.gid()) })
}

// forget removes the record of an instance before its pins. After a kill in between, the next Lock records it again.
func (l *WriteLock) forget(i Instance) {
	_ = l.files().RemoveAll(filepath.Join(l.recordsAt(l.device()), recordName(i)))
	_ = l.files().RemoveAll(l.remarksPath(i))
}

// forgetDir removes the record of the instance in dir, because its form has changed.
func (l *WriteLock) forgetDir(dir string) {
	feature := filepath.Dir(dir)
	l.forget(Instance{Scope: filepath.Base(filepath.Dir(feature)), Feature: filepath.Base(feature), Name: filepath.Base(dir)})
}

// noteMissing records the instances without a readable record, left by a killed writer or a full disk. It removes the
// records of instances without pins and without a network namespace, because nothing can recover them.
func (l *WriteLock) noteMissing() {
	all, err := l.Instances("")
	if err != nil {
		return
	}
	have := map[string]bool{}
	entries, _ := l.files().ReadDir(l.recordsAt(l.device()))
	for _, e := range entries {
		have[e.Name()] = true
	}
	for _, i := range all {
		if _, err := l.readRecord(filepath.Join(l.recordsAt(l.device()), recordName(i))); err != nil {
			l.note(i)
		}
		delete(have, recordName(i))
	}
	l.forgetGone(maps.Keys(have))
}

// forgetGone removes the records with these names if they are of instances without a network namespace.
func (l *WriteLock) forgetGone(names iter.Seq[string]) {
	for name := range names {
		f := strings.Split(name, "+")
		if i := (Instance{f[0], f[min(1, len(f)-1)], f[len(f)-1]}); recordName(i) == name && netns.Gone(i.Scope, l.netnsCookie(i)) {
			l.forget(i)
		}
	}
}

// SweepRecords removes the records of a root without a directory: of instances without a network namespace, and without
// other records also one text of Keep. It creates nothing, because the owner of the records chooses the root's name.
func (r *Root) SweepRecords(text string) {
	if _, err := os.Lstat(r.path); !errors.Is(err, os.ErrNotExist) || r.device() == 0 {
		return // its next writer removes them
	}
	l := &WriteLock{Root: r} // without a directory nobody holds the lock
	l.forgetGone(slices.Values(l.files().Names(l.recordsAt(l.device()))))
	l.closeRecords(l.device())
	if !slices.ContainsFunc(l.files().Names(l.recordsPath()), func(n string) bool { return n != servingName && n != "+"+text }) {
		_ = l.Forget(text)
		l.closeServing()
	}
}

// closeRecords removes the records' directories once they are empty.
func (l *WriteLock) closeRecords(device uint64) {
	dir := l.recordsAt(device)
	entries, err := l.files().ReadDir(dir)
	rest := slices.DeleteFunc(entries, func(e os.DirEntry) bool { return e.Name() == rootRecordName || e.Name() == remarksName })
	if err == nil && len(rest) == 0 {
		_ = l.files().RemoveAll(dir)
	}
	l.closeServing()
}

// recordedMaps returns the recorded maps of an instance with this directory.
func (r *Root) recordedMaps(i Instance, dir uint64) []string {
	rec, err := r.readRecord(filepath.Join(r.recordsAt(r.device()), recordName(i)))
	if err != nil || rec.Dir != dir {
		return nil
	}
	return slices.Collect(maps.Keys(rec.Maps))
}

func (r *Root) readRecord(path string) (rec record, err error) {
	b, err := r.files().ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, &rec)
	}
	if err == nil {
		err = rec.Instance.validate()
	}
	var m Meta
	if err == nil && m.unmarshal(rec.Meta) == nil {
		rec.cookie, err = m.Cookie, m.parts.Fits(rec.Instance.String())
	}
	// Names of pins become paths and texts.
	maps.DeleteFunc(rec.Maps, func(name string, _ ebpf.MapID) bool { return !validName(name) })
	maps.DeleteFunc(rec.Links, func(name string, _ linkRecord) bool { return !validName(name) })
	return rec, err
}

// recordCache caches records by the modification time of their file.
type recordCache map[string]struct {
	at  time.Time
	rec record
}

// read reads all records of a directory.
func (c recordCache) read(r *Root, dir string) map[Instance]record {
	out := map[Instance]record{}
	entries, _ := r.files().ReadDir(dir)
	for _, e := range entries {
		if e.Name() == rootRecordName || e.IsDir() || strings.HasSuffix(e.Name(), ".new") {
			continue
		}
		path := filepath.Join(dir, e.Name())
		info, err := e.Info()
		if err != nil {
			continue
		}
		if have, ok := c[path]; ok && have.at.Equal(info.ModTime()) {
			out[have.rec.Instance] = have.rec
			continue
		}
		rec, err := r.readRecord(path)
		if err != nil || recordName(rec.Instance) != e.Name() {
			continue
		}
		c[path] = struct {
			at  time.Time
			rec record
		}{info.ModTime(), rec}
		out[rec.Instance] = rec
	}
	return out
}

// inOrder returns the records' instances, sorted by name.
func inOrder(recs map[Instance]record) []Instance {
	return slices.SortedFunc(maps.Keys(recs), func(a, b Instance) int { return strings.Compare(a.String(), b.String()) })
}

// Known lists the instances of a feature, as Instances does, and the instances with a record but no pins.
func (r *Root) Known(feature string) ([]Instance, error) {
	all, err := r.Instances(feature)
	if err != nil {
		return nil, err
	}
	entries, _ := r.files().ReadDir(r.recordsAt(r.device()))
	for _, e := range entries {
		f := strings.Split(e.Name(), "+")
		if len(f) < 3 || f[1] != feature {
			continue
		}
		// weir's own names begin with @, and no name contains a +.
		if i := (Instance{Scope: f[0], Feature: f[1], Name: f[2]}); recordName(i) == e.Name() && i.validate() == nil && !slices.Contains(all, i) &&
			(i.Scope == HostScope || !othersNow(i.Scope, func(string) uint64 { return r.netnsCookie(i) })) {
			all = append(all, i)
		}
	}
	return all, nil
}

// Recorded returns the last published meta of an instance, for an instance with damaged pins. It returns ErrNotExist if
// there is no record.
func (r *Root) Recorded(i Instance) (m Meta, err error) {
	rec, err := r.readRecord(filepath.Join(r.recordsAt(r.device()), recordName(i)))
	if err != nil {
		return m, fmt.Errorf("%s: %w", i, ErrNotExist)
	}
	return m, m.unmarshal(rec.Meta)
}

const remarksName = "+remarks"

func (r *Root) remarksPath(i Instance) string {
	return filepath.Join(r.recordsAt(r.device()), remarksName, recordName(i))
}

// Remark stores a text beside a published instance, for readers without the needed access. An empty text removes it.
// Remarks end with the instance. No lock is needed, because each key is replaced atomically. Like records, remarks are
// optional: a write error is ignored.
func (r *Root) Remark(i Instance, key, text string) {
	dir := r.remarksPath(i)
	path := filepath.Join(dir, key)
	if text == "" {
		_ = r.files().RemoveAll(path)
		return
	}
	if have, err := r.files().ReadFile(path); err == nil && string(have) == text {
		return
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(filepath.Dir(dir)), rootRecordName)); err != nil {
		return // nothing is recorded here
	}
	if errors.Join(r.makeRecords(filepath.Dir(dir)), r.makeRecords(dir)) == nil {
		_ = r.replace(path, []byte(text))
	}
}

// Remarks returns the text stored by Remark in one line, or "".
func (r *Root) Remarks(i Instance, key string) string {
	b, err := r.files().ReadFile(filepath.Join(r.remarksPath(i), key))
	if err != nil {
		return ""
	}
	return printable.OneLine(string(b))
}
