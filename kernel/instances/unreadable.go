// SPDX-License-Identifier: Apache-2.0

package instances

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/weir-project/weir/kernel"
)

// Unread is an unreadable instance: made by another version of weir, or damaged.
type Unread struct {
	kernel.Instance
	Err error
}

// Unreadable lists the unreadable instances of a feature. They do not affect reading, changing, removing or recovering
// others.
type Unreadable []Unread

// Add appends an instance.
func (u *Unreadable) Add(i kernel.Instance, err error) { *u = append(*u, Unread{i, err}) }

// Err joins the errors, or returns nil if there are none.
func (u Unreadable) Err() error {
	var errs []error
	for _, x := range u {
		errs = append(errs, x)
	}
	return errors.Join(errs...)
}

// In returns the instances of a scope.
func (u Unreadable) In(scope string) (out Unreadable) {
	for _, x := range u {
		if x.Scope == scope {
			out = append(out, x)
		}
	}
	return out
}

// WithoutDamage omits the instances reported by a [kernel.Checker].
func (u Unreadable) WithoutDamage() Unreadable {
	return slices.DeleteFunc(slices.Clone(u), func(x Unread) bool { return errors.Is(x.Err, kernel.ErrDamaged) })
}

// Has reports whether an instance is in the list.
func (u Unreadable) Has(i kernel.Instance) bool {
	return slices.ContainsFunc(u, func(x Unread) bool { return x.Instance == i })
}

// Error names the instance and the reason.
func (u Unread) Error() string {
	if text := u.Err.Error(); strings.Contains(text, u.Instance.String()) {
		return text
	}
	return fmt.Sprintf("%s: %v", u.Instance, u.Err)
}

// Unwrap returns the reason.
func (u Unread) Unwrap() error { return u.Err }

// unread is an Unread as JSON.
type unread struct {
	Scope   string `json:"scope"`
	Feature string `json:"feature"`
	Name    string `json:"name"`
	Err     string `json:"error"`
}

// MarshalJSON writes the instance and the reason.
func (u Unread) MarshalJSON() ([]byte, error) {
	return json.Marshal(unread{u.Scope, u.Feature, u.Name, u.Err.Error()})
}

// UnmarshalJSON decodes the output of MarshalJSON. The reason becomes a plain error text.
func (u *Unread) UnmarshalJSON(b []byte) error {
	var x unread
	if err := json.Unmarshal(b, &x); err != nil {
		return err
	}
	*u = Unread{kernel.Instance{Scope: x.Scope, Feature: x.Feature, Name: x.Name}, errors.New(x.Err)}
	return nil
}
