"""A folder on whichever file system Spark knows it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Store:
    """A folder; places in it are named by their path from there."""

    def __init__(self, spark: "SparkSession", root: str) -> None:
        self._jvm = spark._jvm
        self._root = self._jvm.org.apache.hadoop.fs.Path(root)
        self._fs = self._root.getFileSystem(spark._jsc.hadoopConfiguration())

    def _path(self, place: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, place)

    def exists(self, place: str) -> bool:
        return bool(self._fs.exists(self._path(place)))

    def delete(self, place: str) -> None:
        self._fs.delete(self._path(place), True)

    def move(self, place: str, to: str) -> None:
        if not self._fs.rename(self._path(place), self._path(to)):
            raise OSError(f"{self._path(place)} could not be moved to {self._path(to)}")

    def names(self, place: str) -> list[str]:
        if not self.exists(place):
            return []
        return sorted(one.getPath().getName() for one in self._fs.listStatus(self._path(place)))

    def text(self, place: str) -> str:
        """What is in a file."""
        stream = self._fs.open(self._path(place))
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def write(self, place: str, text: str) -> None:
        """Make a file."""
        stream = self._fs.create(self._path(place))
        try:
            stream.write(text.encode())
        finally:
            stream.close()

    def note(self, place: str, name: str) -> None:
        """Leave an empty file of this name, and no other, in a folder."""
        self._fs.create(self._path(f"{place}/{name}")).close()
        for other in self.names(place):
            if other != name:
                self.delete(f"{place}/{other}")
