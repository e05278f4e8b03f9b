// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"os"
	"path/filepath"
)

const remarksName = "+remarks"

func (r *Root) remarksOf(i Instance) string {
	return filepath.Join(r.recordsAt(r.device()), remarksName, recordName(i))
}

// Remark keeps a text beside a published instance, for readers who cannot find out
// themselves; an empty text ends it. It goes with the instance. It needs no lock: each key
// is replaced in one step. Like records, remarks are an aid: failing to write one is no error.
func (r *Root) Remark(i Instance, key, text string) {
	dir := r.remarksOf(i)
	path := filepath.Join(dir, key)
	if text == "" {
		os.Remove(path)
		return
	}
	if have, err := os.ReadFile(path); err == nil && string(have) == text {
		return
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(filepath.Dir(dir)), rootRecordName)); err != nil {
		return // nothing is recorded here
	}
	if errors.Join(r.makeRecords(filepath.Dir(dir)), r.makeRecords(dir)) == nil {
		_ = r.writeFile(path, []byte(text))
	}
}

// Remarks reads what Remark keeps: an empty text where there is none.
func (r *Root) Remarks(i Instance, key string) string {
	b, err := os.ReadFile(filepath.Join(r.remarksOf(i), key))
	if err != nil {
		return ""
	}
	return string(b)
}
